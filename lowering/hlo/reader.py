"""A reader of the HLO text that compiled executables print: computations, instructions, shapes.

It parses only the parts needed by the audit: names, result shapes, opcodes, operand names and the text of
attributes. Unknown opcodes and attributes are preserved. `walk` interprets the instructions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from commplan.lowering.hlo.sources import Frames, read_frames

# Bits of an element by HLO's name of the type; of small floats, such as "f8e5m2", by its part before the `e`.
_BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64,
    "c128": 128, "f4": 4, "f8": 8,
}  # fmt: skip
_OPEN = "([{"
_CLOSE = ")]}"
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([^\]]*)\]")  # f32[2,3]
_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-$]+)\s*\(.*\{\s*$")  # ENTRY %main (x: f32[2]) -> f32[2] {
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-$]+)\s*=\s*(.*)$")  # ROOT %sum = f32[2] add(%a, %b)
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")  # the opcode and the parenthesis that opens its operands
_NAME = re.compile(r"%([\w.\-$]+)")  # a reference to an instruction or a computation
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_AXIS = re.compile(r"'([^']*)'=(\d+)")  # one axis of a mesh: 'a'=2
_MESH = re.compile(r"mesh\[((?:'[^']*'=\d+,?)+)\] \{((?:'[^']*',?)+)\}")  # mesh['a'=2,'b'=4] {'b'}
_LISTED = re.compile(r"(?:^|/)(\()")  # the parenthesis that opens a list of merged names: path/(a:b)
_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")  # [2,4]<=[4,2]T(1,0)


class HloError(ValueError):
    """The text is not HLO, or contains syntax that this reader does not support."""


class Tensor(msgspec.Struct, frozen=True):
    """An array of a result.

    Attributes:
        dtype: HLO's name of the element type, such as `f32` or `pred`; also `token` and `opaque`.
        shape: The dimensions; of a dynamic dimension, the bound.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; 0 for tokens, opaque results and unknown element types."""
        bits = _BITS.get(self.dtype) or _BITS.get(self.dtype.partition("e")[0], 0)
        return (self.size * bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class HloInstruction(msgspec.Struct, frozen=True):
    """A line of a computation.

    Attributes:
        name: Its name, without the leading `%`.
        opcode: The opcode, such as `all-reduce-start`.
        results: The arrays of its result; those of nested tuples in one sequence.
        operands: The names of its operands.
        attributes: The text after the operands.
        position: Its index in the computation, which is the order of issue in scheduled HLO.
        root: Whether its result is the result of the computation.
    """

    name: str
    opcode: str
    results: tuple[Tensor, ...]
    operands: tuple[str, ...]
    attributes: str
    position: int
    root: bool = False

    def attribute(self, key: str) -> str | None:
        """The text of attribute `key` up to the comma that ends it, or None."""
        match = re.search(rf"(?:^|, ){re.escape(key)}=", self.attributes)
        if match is None:
            return None
        return self.attributes[match.end() : _end_of_item(self.attributes, match.end())]

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(tensor.nbytes for tensor in self.results)

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of the computations that it calls: fusions, calls, loops, branches, reductions."""
        names: list[str] = []
        for key in ("calls", "to_apply", "body", "condition", "branch_computations", "called_computations"):
            text = self.attribute(key)
            if text is not None:
                names += _NAME.findall(text) or [text.strip("{} ")]
        return tuple(names)

    @property
    def op_name(self) -> str:
        """JAX's path of the operation, such as `jit(step)/scope/add`; empty if the text has none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def op_names(self) -> tuple[str, ...]:
        """The `op_name` of each operation that XLA merged into this one.

        Since JAX 0.11 `path/(a:b)` denotes two operations, `path/a` and `path/b`.
        """
        return tuple(_merged_names(self.op_name))

    @property
    def scheduled_name(self) -> str:
        """The name during scheduling, otherwise `name`. XLA renames collectives that it makes synchronous."""
        match = re.search(r'scheduling_name="([^"]+)"', self.attributes)
        return match.group(1) if match else self.name


class Computation(msgspec.Struct, frozen=True):
    """A computation of a module.

    Attributes:
        name: Its name, without the leading `%`.
        instructions: Its instructions in the order of the text; in scheduled HLO, the order of issue.
    """

    name: str
    instructions: tuple[HloInstruction, ...]

    @property
    def root(self) -> HloInstruction:
        """The instruction with the result: the one that is marked as root, otherwise the last one."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])


class Module(msgspec.Struct, frozen=True):
    """An HLO module.

    Attributes:
        entry: The name of its entry computation.
        partitions: The number of partitions, which SPMD partitioning numbers from 0; 1 if not partitioned.
        computations: All computations by name.
        frames: The stack frames to which instructions refer; empty if the text has none.
    """

    entry: str
    partitions: int
    computations: dict[str, Computation]
    frames: Frames


def read_module(text: str) -> Module:
    """Parse the text of an HLO module (`compiled.as_text()`). Lines that are not understood are skipped.

    Raises:
        HloError: It contains no module or no complete entry computation.
    """
    header = re.search(r"^HloModule\s+([\w.\-$<>]+)(.*)$", text, re.MULTILINE)
    if header is None:
        raise HloError("no line begins with HloModule: this is not the text of a compiled HLO module")
    entry = ""
    computations: dict[str, Computation] = {}
    current: str | None = None
    lines: list[HloInstruction] = []
    for line in text[header.end() :].splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head is not None:
                current, lines = head.group(2), []
                entry = current if head.group(1) else entry
            continue
        if line.startswith("}"):
            computations[current], current = Computation(current, tuple(lines)), None
            continue
        instruction = _read_instruction(line, len(lines))
        if instruction is not None:
            lines.append(instruction)
    if entry not in computations:
        raise HloError(f"module {header.group(1)} has no complete ENTRY computation: is the text cut off?")
    count = re.search(r"num_partitions=(\d+)", header.group(2))
    return Module(entry, int(count.group(1)) if count else 1, computations, read_frames(text))


def read_groups(text: str, partitions: int) -> tuple[tuple[int, ...], ...]:
    """Expand `replica_groups` or `source_target_pairs`.

    Supported forms are lists `{{0,1},{2,3}}`, iotas `[2,4]<=[4,2]T(1,0)`, and mesh axes `mesh['a'=2,'b'=4]
    {'b'}` (since JAX 0.11). An empty list denotes one group of all partitions.

    Args:
        text: The text of the attribute.
        partitions: The number of partitions of the module.

    Returns:
        The partitions of each group, or the source and target of each pair, in the order of the text.

    Raises:
        HloError: The form is unknown.
    """
    text = text.strip()
    iota = _IOTA.match(text)
    if iota is not None:
        rows, dims = _ints(iota.group(1)), _ints(iota.group(2))
        order = _ints(iota.group(3)) if iota.group(3) else tuple(range(len(dims)))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return tuple(map(tuple, ids.reshape(-1, math.prod(rows[1:])).tolist()))
    mesh = _MESH.fullmatch(text)
    if mesh is not None:
        return _along(dict(_AXIS.findall(mesh.group(1))), re.findall(r"'([^']*)'", mesh.group(2)))
    if text in ("{}", "{{}}"):
        return (tuple(range(partitions)),)
    if not re.fullmatch(r"\{(\{[\d,]*\},?)+\}", text):
        raise HloError(f"replica groups in an unknown form: {text[:80]}")
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _along(mesh: Mapping[str, str], axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The groups along `axes`, for partitions counted row-major over `mesh`.

    Args:
        mesh: The size of each axis as text, by name, the major axis first.
        axes: The axes of a group, the major one first.
    """
    names = list(mesh)
    ids = np.arange(math.prod(map(int, mesh.values()))).reshape([int(size) for size in mesh.values()])
    other_axes = [number for number, name in enumerate(names) if name not in axes]
    ids = ids.transpose(*other_axes, *(names.index(axis) for axis in axes))
    return tuple(map(tuple, ids.reshape(-1, math.prod(int(mesh[axis]) for axis in axes)).tolist()))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _read_instruction(line: str, position: int) -> HloInstruction | None:
    """The instruction of a line; None if the line has another form."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    body = match.group(3)
    # The result's shape is a parenthesized tuple or one word, whose layout may contain brackets.
    end = _end_of_bracket(body, 0) if body.startswith("(") else len(body.partition(" ")[0])
    opcode = _OPCODE.match(body, end)
    if opcode is None:
        return None
    close = _end_of_bracket(body, opcode.end() - 1)
    shapes = _ARRAY.findall(body[:end])
    results = tuple(Tensor(dtype, _ints(re.sub(r"[<= ]", "", dims))) for dtype, dims in shapes)
    operands = tuple(_NAME.findall(body[opcode.end() : close - 1]))
    attributes = body[close:].removeprefix(", ")
    root = match.group(1) is not None
    return HloInstruction(match.group(2), opcode.group(1), results, operands, attributes, position, root)


def _merged_names(name: str) -> Iterator[str]:
    """The names that `name` lists in parentheses after a common path, or `name` itself.

    Only a list that extends to the end of the name counts: `jit(f)/add` has a parenthesis, but no list.
    """
    opening = next(
        (m.start(1) for m in _LISTED.finditer(name) if _end_of_bracket(name, m.start(1)) == len(name)), -1
    )
    if opening < 0:
        yield name
        return
    start = opening + 1
    while start < len(name):
        end = _end_of_item(name, start, ":)")
        yield from _merged_names(name[:opening] + name[start:end])
        start = end + 1


def _end_of_bracket(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`, ignoring brackets in strings.

    The length of the text if none closes it. Kinds of brackets are not distinguished.
    """
    depth, quoted = 0, False
    for index in range(start, len(text)):
        char = text[index]
        if char == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0:
                return index + 1
    return len(text)


def _end_of_item(text: str, start: int, ends: str = ",") -> int:
    """The index of the first character from `start` that is in `ends` and outside of brackets and strings.

    The length of the text if there is none.
    """
    index = start
    while index < len(text) and text[index] not in ends:
        if text[index] in _OPEN:
            index = _end_of_bracket(text, index)
        elif text[index] == '"':
            string = _STRING.match(text, index)
            index = string.end() if string else len(text)
        else:
            index += 1
    return index
