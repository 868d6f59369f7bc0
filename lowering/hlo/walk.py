"""Converts HLO text to a `CompiledStep`, by visiting instructions in order of issue and classifying them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commplan.lowering.hlo.reader import Computation, HloInstruction, Module, Tensor, read_groups, read_module
from commplan.lowering.hlo.step import (
    CollectiveOrigin,
    CompiledCollective,
    CompiledStep,
    Loop,
    MemoryMove,
    Product,
)

# The kind of collective by opcode, in the words of a schedule.
_KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "permute",
}
# The reduction by the opcode that combines two elements; `or` and `and` combine booleans.
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "or": "max", "and": "min"}
# Opcodes that write no memory: they only name values.
_NAMES_ONLY = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
        "partition-id", "async-update",
    }
)  # fmt: skip
_UPDATE = "dynamic-update-slice"  # XLA executes it in place: it writes only the slice
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})  # they read only a part of their first operand
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')  # in the attributes of a loop
# The contracted dimensions of a product's first operand: of a `dot`, or in the JSON of a library call.
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{([\d,]*)\}|ensions":\[([^\]]*)\])')
_BUCKET = re.compile(r'combiner_key="([^"]*)"')
_PRODUCTS = re.compile(r"gemm|matmul|\$dot|conv", re.IGNORECASE)  # targets of library calls that are products
_Shapes = Mapping[str, tuple[Tensor, ...]]  # the results of instructions by name


def audit_text(hlo_text: str) -> CompiledStep:
    """Parse compiled, scheduled HLO (`jax.jit(f).lower(...).compile().as_text()`) into a `CompiledStep`.

    Raises:
        HloError: The text is not a whole HLO module, or contains replica groups in an unknown form.
    """
    module = read_module(hlo_text)
    walk = _HloVisitor(module)
    walk.run(module.computations[module.entry], ())
    counts = (tuple(sorted(counter.items())) for counter in (walk.ops, walk.fused))
    visited = (tuple(walk.loops), tuple(walk.collectives), tuple(walk.products), tuple(walk.moves))
    return CompiledStep(module.entry, *visited, *counts)


def _ends(computation: Computation) -> dict[str, int]:
    """The position of the done of each asynchronous operation of `computation`, by the name of its start."""
    begun: dict[str, str] = {}  # the start of each `async-update`, which a done may refer to
    ends: dict[str, int] = {}
    for instruction in computation.instructions:
        if not instruction.operands:
            continue
        start = begun.get(instruction.operands[0], instruction.operands[0])
        if instruction.opcode == "async-update":
            begun[instruction.name] = start
        elif instruction.opcode.endswith("-done"):
            ends[start] = instruction.position
    return ends


def _flops(instruction: HloInstruction, shapes: _Shapes) -> int:
    """Twice the multiplications of a dot, a convolution or a matrix library call; otherwise 0."""
    tensors = [tensor for name in instruction.operands for tensor in shapes.get(name, ())[:1]]
    size = math.prod(instruction.results[0].shape) if instruction.results else 0
    if (labels := instruction.attribute("dim_labels")) and len(tensors) > 1:
        # A convolution, with labels such as `b01f_01io->b01f`: `o` marks the kernel's output features.
        kernel, result = _kernel_and_result(instruction, tensors)
        features = labels.replace("->", "_").split("_")[1].find("o")
        return 2 * result.size * kernel.size // (kernel.shape[features] if features >= 0 else 1)
    if instruction.opcode not in ("dot", "custom-call") or len(tensors) < 2:
        return 0
    contracted = _CONTRACTED.search(instruction.attributes)
    if contracted is None:
        return 0
    dims = [int(text) for text in re.findall(r"\d+", contracted.group(1) or contracted.group(2))]
    return 2 * size * math.prod(tensors[0].shape[dim] for dim in dims) if dims else 0


def _kernel_and_result(instruction: HloInstruction, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The kernel and the result of a convolution; for its derivatives, those of the forward convolution."""
    target = instruction.attribute("custom_call_target") or ""
    if "BackwardFilter" in target:
        return instruction.results[0], tensors[1]
    return tensors[1], tensors[0] if "BackwardInput" in target else instruction.results[0]


def _parts(computation: Computation) -> dict[tuple[str, int], HloInstruction]:
    """The instruction that extracts array `index` of a result, by the result's name and the index.

    The results of an asynchronous operation are those of its start.
    """
    extractors: dict[tuple[str, int], HloInstruction] = {}
    starts: dict[str, str] = {}  # the start of each done
    for instruction in computation.instructions:
        if instruction.opcode.endswith("-done") and instruction.operands:
            starts[instruction.name] = instruction.operands[0]
        elif instruction.opcode == "get-tuple-element":
            name = instruction.operands[0]
            extractors[starts.get(name, name), int(instruction.attribute("index") or 0)] = instruction
    return extractors


class _Frame(NamedTuple):
    """A computation being visited.

    Attributes:
        computation: Its name.
        loops: Names of the enclosing loops, outermost first.
        shapes: Results of its instructions, by name.
        ends: Positions of dones, by the name of the start; see `_ends`.
        parts: Instructions that extract arrays from tuples; see `_parts`.
    """

    computation: str
    loops: tuple[str, ...]
    shapes: _Shapes
    ends: Mapping[str, int]
    parts: Mapping[tuple[str, int], HloInstruction]


class _HloVisitor:
    """Visits executed instructions in order: the entry computation with its loop bodies, calls and branches.

    Its lists and counters become the fields of a `CompiledStep`; `fused` becomes `fused_ops`.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.loops: list[Loop] = []
        self.collectives: list[CompiledCollective] = []
        self.products: list[Product] = []
        self.moves: list[MemoryMove] = []
        self.ops: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()

    def run(self, computation: Computation, loops: tuple[str, ...]) -> None:
        """Visit `computation`, which is executed in `loops` (names, outermost first)."""
        shapes = {i.name: i.results for i in computation.instructions}
        frame = _Frame(computation.name, loops, shapes, _ends(computation), _parts(computation))
        for instruction in computation.instructions:
            self._visit(instruction, frame)

    def _visit(self, instruction: HloInstruction, frame: _Frame) -> None:
        """Record an instruction as a loop, collective, product or move, and visit computations it runs."""
        opcode = instruction.opcode
        if opcode in _NAMES_ONLY or opcode.endswith("-done"):
            return
        if opcode == "while":
            body = (instruction.attribute("body") or "").lstrip("%")
            trips = _TRIPS.search(instruction.attributes)
            times = int(trips.group(1)) if trips else None
            name = instruction.scheduled_name
            self.loops.append(Loop(body, frame.computation, instruction.position, times, name))
            self.run(self.module.computations[body], (*frame.loops, instruction.name))
            return
        if opcode in ("call", "conditional"):
            for name in instruction.calls:
                self.run(self.module.computations[name], frame.loops)
            return

        # `ops` counts an asynchronous start under its own opcode. It is classified as the started operation.
        self.ops[opcode] += 1
        inputs = tuple(tensor for name in instruction.operands for tensor in frame.shapes.get(name, ()))
        core = self._core(instruction)
        if core.opcode not in _KINDS:
            instruction = self._synchronous(instruction, core)
        fused = list(self._inner(instruction, frame.shapes))
        self.fused.update(inner.opcode for inner, _ in fused if inner.opcode not in _NAMES_ONLY)
        if core.opcode in _KINDS:
            self.collectives.append(self._collective(instruction, core, inputs, frame))
            return

        # A product is found by its opcode, by the opcodes in a fusion, or by the name of a library function.
        place = (instruction.scheduled_name, frame.computation, instruction.position)
        target = instruction.attribute("custom_call_target") if instruction.opcode == "custom-call" else None
        dots = any(inner.opcode in ("dot", "convolution") for inner, _ in fused)
        if dots or _PRODUCTS.search(target or ""):
            flops = sum(_flops(inner, inner_shapes) for inner, inner_shapes in fused)
            self.products.append(Product(*place, inputs, instruction.results, flops))
            return

        kind = instruction.opcode
        if kind == "fusion":
            kind = self.module.computations[instruction.calls[0]].root.opcode
        reads, written = self._reads(instruction, frame.shapes), self._written(instruction, frame.shapes)
        self.moves.append(MemoryMove(kind, *place, written, reads))

    def _inner(
        self, instruction: HloInstruction, shapes: _Shapes
    ) -> Iterator[tuple[HloInstruction, _Shapes]]:
        """The instructions of a fusion, or the instruction itself, with the shapes of their operands."""
        if instruction.opcode != "fusion":
            yield instruction, shapes
            return
        for name in instruction.calls:
            body = self.module.computations[name]
            results_by_name = {i.name: i.results for i in body.instructions}
            for inner in body.instructions:
                yield from self._inner(inner, results_by_name)

    def _reads(self, instruction: HloInstruction, shapes: _Shapes) -> int:
        """Bytes that a move reads: of a sliced operand the slices, of one updated in place nothing.

        In a fusion, a parameter counts as sliced if all instructions that read it are slices.
        """
        sizes = [sum(t.nbytes for t in shapes.get(name, ())) for name in instruction.operands]
        if instruction.opcode in _SLICES and sizes:
            return min(sizes[0], instruction.nbytes)
        if instruction.opcode == _UPDATE:
            return sum(sizes[1:])
        if instruction.opcode != "fusion":
            return sum(sizes)
        total = 0
        for inner in self.module.computations[instruction.calls[0]].instructions:
            if inner.opcode != "parameter":
                continue
            users = self._users(instruction.calls[0], inner.name)
            readers = [user for user in users if user.opcode != _UPDATE or user.nbytes != inner.nbytes]
            sliced = bool(users) and all(user.opcode in _SLICES for user in readers)
            total += min(inner.nbytes, sum(user.nbytes for user in readers)) if sliced else inner.nbytes
        return total

    def _written(self, instruction: HloInstruction, shapes: _Shapes) -> tuple[Tensor, ...]:
        """The arrays that a move writes; for an update in place, only the slice that it writes."""
        if instruction.opcode == _UPDATE:
            return shapes.get(instruction.operands[1], instruction.results)
        if instruction.opcode != "fusion":
            return instruction.results
        body = self.module.computations[instruction.calls[0]]
        by_name = {inner.name: inner for inner in body.instructions}
        roots = [by_name[name] for name in body.root.operands] if body.root.opcode == "tuple" else [body.root]
        written: list[Tensor] = []
        for element in roots:
            root = element
            while root.opcode == "bitcast":
                root = by_name[root.operands[0]]
            written += by_name[root.operands[1]].results if root.opcode == _UPDATE else root.results
        return tuple(written)

    def _users(self, computation: str, name: str) -> list[HloInstruction]:
        """The instructions that read value `name`, looking through bitcasts."""
        users: list[HloInstruction] = []
        for other in self.module.computations[computation].instructions:
            if name in other.operands:
                users += self._users(computation, other.name) if other.opcode == "bitcast" else [other]
        return users

    def _core(self, instruction: HloInstruction) -> HloInstruction:
        """The operation that an asynchronous start performs, with the opcode of its synchronous form.

        Other instructions are returned unchanged.
        """
        if instruction.opcode == "async-start":
            return self.module.computations[instruction.calls[0]].root
        return replace(instruction, opcode=instruction.opcode.removesuffix("-start"))

    def _synchronous(self, instruction: HloInstruction, core: HloInstruction) -> HloInstruction:
        """`instruction` in synchronous form, with the opcode, attributes and result of `core`."""
        if not instruction.opcode.endswith("-start"):
            return instruction
        root = self.module.computations[core.calls[0]].root if core.opcode == "fusion" else core
        results = root.results[:1] if core.opcode == "copy" else root.results
        return replace(instruction, opcode=core.opcode, attributes=core.attributes, results=results)

    def _collective(
        self, instruction: HloInstruction, core: HloInstruction, inputs: tuple[Tensor, ...], frame: _Frame
    ) -> CompiledCollective:
        """The collective of an instruction.

        Args:
            instruction: The instruction that is issued: the collective or its start.
            core: The collective itself; see `_core`.
            inputs: The arrays that the instruction reads.
            frame: The computation with the instruction.
        """
        pairs = core.attribute("source_target_pairs")
        groups = read_groups(pairs or core.attribute("replica_groups") or "{}", self.module.partitions)
        channel = core.attribute("channel_id")
        reduction = core.attribute("to_apply")
        outputs = core.results
        if instruction.opcode.endswith("-start") and len(outputs) >= 2 * len(inputs) > 0:
            outputs = outputs[len(inputs) : 2 * len(inputs)]  # a start returns (operands, results, ..)
        start, name = instruction.position, instruction.name
        done = frame.ends.get(name, start)
        op = self._reduction(reduction) if reduction else None
        channel_number = int(channel) if channel else None
        op_name = instruction.op_name or core.op_name
        synchronous = '"is_sync":true' in instruction.attributes or done == start
        place = (frame.computation, start, done, frame.loops)
        names = (instruction.scheduled_name, op_name)

        # If named, the instructions that extract the arrays of a merged collective have their origins.
        extractors = [frame.parts.get((name, index)) for index in range(len(inputs))]
        is_named = len(inputs) > 1 and all(extractors) and any(part.op_name for part in extractors if part)
        listed = extractors if is_named else [instruction if instruction.op_name else core]
        origins = tuple(
            origin
            for source_instruction in listed
            if source_instruction
            for origin in self._origins(source_instruction)
        )
        keys = {
            match[1] if (match := _BUCKET.search(source_instruction.attributes)) else ""
            for source_instruction in listed
            if source_instruction
        }
        bucket = keys.pop() if len(keys) == 1 else ""
        arrays = (inputs, outputs, groups, channel_number)
        return CompiledCollective(
            _KINDS[core.opcode], op, *arrays, *place, *names, synchronous, origins, bucket
        )

    def _origins(self, instruction: HloInstruction) -> Iterator[CollectiveOrigin]:
        """The origin of each operation merged into `instruction`.

        If there are several, their sources are unknown, because the text has only one.
        """
        names = instruction.op_names
        source = self.module.frames.source_of(instruction.attributes) if len(names) == 1 else ""
        yield from (CollectiveOrigin(name, source) for name in names)

    def _reduction(self, name: str) -> str | None:
        """The reduction of computation `name`: `sum`, `max`, `min`, or the opcode for another one."""
        root = self.module.computations[name.lstrip("%")].root
        # Promoted reductions end in a conversion of the sum; look through it.
        body = {i.name: i for i in self.module.computations[name.lstrip("%")].instructions}
        while root.opcode in ("convert", "bitcast") and root.operands:
            root = body[root.operands[0]]
        return _REDUCTIONS.get(root.opcode, root.opcode)
