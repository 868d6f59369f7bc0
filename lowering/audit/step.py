"""What a compiled step really does: its collectives, matrix products and copies, in the order of issue."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import msgspec

from commplan.lowering.audit.hlo import Computation, Instruction, Module, Tensor, read_groups, read_module

_KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "permute",
}
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "or": "max", "and": "min"}
_NAMES_ONLY = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
        "partition-id", "async-update",
    }
)  # fmt: skip
_PRODUCTS = re.compile(r"gemm|matmul|\$dot|conv", re.IGNORECASE)


class Found(msgspec.Struct, frozen=True):
    """One collective of the compiled step.

    `inputs` and `outputs` are what one rank gives and gets; `groups` the partitions that take part
    together, by their place in the mesh's row-major order (for `permute`: source and target pairs).
    `start` and `done` are positions in `computation`, equal where it is not asynchronous; `loops`
    names the loops around it, outermost first.
    """

    kind: str
    op: str | None
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    groups: tuple[tuple[int, ...], ...]
    channel: int | None
    computation: str
    start: int
    done: int
    loops: tuple[str, ...]
    name: str
    op_name: str
    synchronous: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.dtype for tensor in self.inputs))

    @property
    def count(self) -> int:
        """Elements that one rank gives."""
        return sum(tensor.size for tensor in self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes that one rank gives."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def __str__(self) -> str:
        what = f"{self.kind}({self.op})" if self.op else self.kind
        shapes = ", ".join(map(str, self.inputs))
        ranks = f"{len(self.groups)} x {len(self.groups[0]) if self.groups else 0} ranks"
        return f"{what} {shapes} over {ranks}" + (f" in loop {self.loops[-1]}" if self.loops else "")


class Product(msgspec.Struct, frozen=True):
    """A matrix product or convolution: where it stands and what it makes."""

    name: str
    computation: str
    position: int
    outputs: tuple[Tensor, ...]
    loops: tuple[str, ...]
    op_name: str


class Move(msgspec.Struct, frozen=True):
    """An instruction that writes memory without computing a product: a copy, a concatenation, a fusion.

    `kind` is the opcode; for a fusion, the opcode of its root. `inputs` and `outputs` are its arrays.
    """

    kind: str
    name: str
    computation: str
    position: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    fused: bool
    loops: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return sum(tensor.nbytes for tensor in self.outputs)


class Loop(msgspec.Struct, frozen=True):
    """A loop that runs: its body's name, and where it stands in which computation."""

    name: str
    body: str
    computation: str
    position: int


class CompiledStep(msgspec.Struct, frozen=True):
    """A compiled step as its scheduled HLO has it. Everything is in the order of issue."""

    module: str
    partitions: int
    scheduled: bool
    entry: str
    loops: tuple[Loop, ...]
    collectives: tuple[Found, ...]
    products: tuple[Product, ...]
    moves: tuple[Move, ...]
    ops: tuple[tuple[str, int], ...]
    """Opcode and count of all instructions that run (names, constants and tuples left out)."""
    fused_ops: tuple[tuple[str, int], ...]
    """The same with the instructions inside fusions in place of the fusions."""

    @property
    def op_count(self) -> int:
        return sum(count for _, count in self.ops)

    def hidden(self, found: Found) -> tuple[Product, ...]:
        """The products that are issued between the start and the done of `found`."""
        return tuple(
            product
            for product in self.products
            if product.computation == found.computation and found.start < product.position < found.done
        )

    @property
    def covered(self) -> float:
        """The share of all bytes given to collectives that has a product between start and done."""
        total = sum(found.nbytes for found in self.collectives)
        under = sum(found.nbytes for found in self.collectives if self.hidden(found))
        return under / total if total else 0.0

    def before(self, found: Found) -> int:
        """How many products of its computation are issued before `found` starts."""
        return sum(p.computation == found.computation and p.position < found.start for p in self.products)

    def copies_of(self, nbytes: int) -> tuple[Move, ...]:
        """The moves that write at least `nbytes` bytes into one array."""
        return tuple(move for move in self.moves if any(out.nbytes >= nbytes for out in move.outputs))

    def timeline(self) -> str:
        """What is issued, on one line: `P` a product, `AR>` a collective's start, `<AR` its done.

        Collectives that are not asynchronous read `AR`; a loop's body stands in `( )`.
        """
        return self._timeline(self.entry)

    def _timeline(self, computation: str) -> str:
        marks = [(p.position, "P") for p in self.products if p.computation == computation]
        for found in self.collectives:
            if found.computation != computation:
                continue
            short = "".join(word[0] for word in found.kind.split("_")).upper()
            if found.start == found.done:
                marks.append((found.start, short))
            else:
                marks += [(found.start, f"{short}>"), (found.done, f"<{short}")]
        for loop in self.loops:
            inside = self._timeline(loop.body) if loop.computation == computation else ""
            if inside:
                marks.append((loop.position, f"( {inside} )"))
        return " ".join(mark for _, mark in sorted(marks))


def audit_text(hlo_text: str) -> CompiledStep:
    """Read compiled, scheduled HLO (`jax.jit(f).lower(...).compile().as_text()`) into a `CompiledStep`.

    Raises `HloError` if the text is not a whole HLO module.
    """
    module = read_module(hlo_text)
    walk = _Walk(module)
    walk.run(module.computations[module.entry], ())
    return CompiledStep(
        module=module.name,
        partitions=module.partitions,
        scheduled=module.scheduled,
        entry=module.entry,
        loops=tuple(walk.loops),
        collectives=tuple(walk.collectives),
        products=tuple(walk.products),
        moves=tuple(walk.moves),
        ops=tuple(sorted(walk.ops.items())),
        fused_ops=tuple(sorted(walk.fused.items())),
    )


def _ends(computation: Computation) -> dict[str, int]:
    """Where each asynchronous operation that starts in `computation` is done."""
    begun: dict[str, str] = {}
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


class _Walk:
    """Visits what runs, in order: the entry computation, and loop bodies, calls and branches inside it."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.loops: list[Loop] = []
        self.collectives: list[Found] = []
        self.products: list[Product] = []
        self.moves: list[Move] = []
        self.ops: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()

    def run(self, computation: Computation, loops: tuple[str, ...]) -> None:
        shapes = {i.name: i.results for i in computation.instructions}
        done = _ends(computation)
        for instruction in computation.instructions:
            self._visit(instruction, computation, loops, shapes, done)

    def _visit(
        self,
        instruction: Instruction,
        computation: Computation,
        loops: tuple[str, ...],
        shapes: dict[str, tuple[Tensor, ...]],
        done: dict[str, int],
    ) -> None:
        opcode = instruction.opcode
        if opcode in _NAMES_ONLY or opcode.endswith("-done"):
            return
        if opcode == "while":
            body = (instruction.attribute("body") or "").lstrip("%")
            self.loops.append(Loop(instruction.name, body, computation.name, instruction.position))
            self.run(self.module.computations[body], (*loops, instruction.name))
            return
        if opcode in ("call", "conditional"):
            for name in instruction.calls:
                self.run(self.module.computations[name], loops)
            return
        self.ops[opcode] += 1
        inputs = tuple(tensor for name in instruction.operands for tensor in shapes.get(name, ()))
        core = self._core(instruction)
        self.fused.update(i.opcode for i in self._inside(instruction) if i.opcode not in _NAMES_ONLY)
        if core.opcode in _KINDS:
            end = done.get(instruction.name, instruction.position)
            self.collectives.append(self._collective(instruction, core, computation.name, inputs, end, loops))
            return
        place = (computation.name, instruction.position)
        if self._is_product(instruction):
            self.products.append(
                Product(instruction.name, *place, instruction.results, loops, instruction.op_name)
            )
            return
        fused = opcode == "fusion"
        kind = self.module.computations[instruction.calls[0]].root.opcode if fused else opcode
        self.moves.append(Move(kind, instruction.name, *place, inputs, instruction.results, fused, loops))

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of a fusion, or the instruction itself."""
        if instruction.opcode != "fusion":
            yield instruction
            return
        for name in instruction.calls:
            for inner in self.module.computations[name].instructions:
                yield from self._inside(inner)

    def _core(self, instruction: Instruction) -> Instruction:
        """The operation behind an asynchronous start, under the opcode of its synchronous form."""
        if instruction.opcode == "async-start":
            return self.module.computations[instruction.calls[0]].root
        return msgspec.structs.replace(instruction, opcode=instruction.opcode.removesuffix("-start"))

    def _collective(
        self,
        instruction: Instruction,
        core: Instruction,
        computation: str,
        inputs: tuple[Tensor, ...],
        done: int,
        loops: tuple[str, ...],
    ) -> Found:
        pairs = core.attribute("source_target_pairs")
        groups = read_groups(pairs or core.attribute("replica_groups") or "{}", self.module.partitions)
        channel = core.attribute("channel_id")
        reduction = core.attribute("to_apply")
        outputs = instruction.results
        if instruction.opcode.endswith("-start"):
            # A start's result holds operands beside results, except for all-reduce.
            outputs = core.results if instruction.opcode == "async-start" else outputs
            if core.opcode in ("all-gather", "collective-permute"):
                outputs = outputs[len(inputs) : 2 * len(inputs)]
        return Found(
            kind=_KINDS[core.opcode],
            op=self._reduction(reduction) if reduction else None,
            inputs=inputs,
            outputs=outputs,
            groups=groups,
            channel=int(channel) if channel else None,
            computation=computation,
            start=instruction.position,
            done=done,
            loops=loops,
            name=instruction.name,
            op_name=instruction.op_name or core.op_name,
            synchronous='"is_sync":true' in instruction.attributes or done == instruction.position,
        )

    def _reduction(self, name: str) -> str | None:
        root = self.module.computations[name.lstrip("%")].root
        # Promoted reductions end in a conversion of the sum; look through it.
        body = {i.name: i for i in self.module.computations[name.lstrip("%")].instructions}
        while root.opcode in ("convert", "bitcast") and root.operands:
            root = body[root.operands[0]]
        return _REDUCTIONS.get(root.opcode, root.opcode)

    def _is_product(self, instruction: Instruction) -> bool:
        if instruction.opcode == "custom-call":
            return bool(_PRODUCTS.search(instruction.attribute("custom_call_target") or ""))
        return any(inner.opcode in ("dot", "convolution") for inner in self._inside(instruction))
