"""Data about a compiled step: its collectives, matrix products and copies, in order of issue.

`walk.audit_text` makes a `CompiledStep` from HLO text. The audit and the estimate of times read it.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

from commplan.ir.schedule import Schedule
from commplan.ir.types import sized
from commplan.lowering.hlo.reader import Tensor

# The scope in which the lowering runs an op of a phase; transformations of JAX add parentheses.
_SCOPE = re.compile(r"commplan\)*/([^/:()]+)\)*/line(\d+)")
Platform = Literal["cpu", "gpu"]


class CollectiveOrigin(msgspec.Struct, frozen=True):
    """The origin of a collective's array.

    Attributes:
        op_name: JAX's path of the operation, such as `jit(f)/commplan/step/line7/psum`; empty if unknown.
        source: `file:line` of the user's code; empty if unknown.
    """

    op_name: str
    source: str = ""

    @property
    def scope(self) -> tuple[str, int] | None:
        """The phase and plan line that requested it; None if no plan did."""
        match = _SCOPE.search(self.op_name)
        return (match[1], int(match[2])) if match else None

    @property
    def primitive(self) -> str:
        """The name of the JAX primitive, such as `psum`, without the suffix `_invariant`."""
        return self.op_name.rpartition("/")[2].strip("()").removesuffix("_invariant")

    def __str__(self) -> str:
        location = f" at {self.source}" if self.source else ""
        return f"`{self.primitive}`{location}"


class Memory(msgspec.Struct, frozen=True):
    """The memory of a compiled step on one device, in bytes, as reported by XLA.

    Attributes:
        arguments: Bytes of all arguments.
        outputs: Bytes of all results, including those in donated arguments.
        donated: Bytes of the results that are stored in donated arguments.
        temporary: Bytes of temporary buffers.
    """

    arguments: int
    outputs: int
    donated: int
    temporary: int

    @property
    def total(self) -> int:
        """Bytes of all buffers, with donated arguments counted once."""
        return self.arguments + self.outputs - self.donated + self.temporary

    def __str__(self) -> str:
        results = f"{sized(self.outputs)} of results"
        results += f" ({sized(self.donated)} of them reuse arguments)" if self.donated else ""
        parts = f"{sized(self.arguments)} of arguments, {results}, {sized(self.temporary)} temporary"
        return f"memory of a device: {sized(self.total)}: {parts}"


class StepText(NamedTuple):
    """A compiled step as text.

    Attributes:
        compiled: The HLO that XLA compiled, after optimization.
        traced: The HLO that JAX passed to XLA.
        platform: The platform that it is compiled for.
        profiled: The HLO compiled with a profile; None if no profile was requested.
        memory: The memory of the step without a profile; None if XLA does not report it.
        layers: The schedules of `run.layers` in this process, which the step may contain.
        pgle: For a step of `run.jit(.., pgle=..)`, whether it was compiled with a profile; None for others.
        programs: The schedules whose phases were traced in the step. Empty if the step was traced before.
    """

    compiled: str
    traced: str
    platform: Platform = "cpu"
    profiled: str | None = None
    memory: Memory | None = None
    layers: tuple[Schedule, ...] = ()
    pgle: bool | None = None
    programs: tuple[Schedule, ...] = ()


class CompiledCollective(msgspec.Struct, frozen=True):
    """A collective of the compiled step.

    Attributes:
        kind: Kind of the collective, in the words of the schedule: `all_reduce`, `permute`, and so on.
        op: Reduction: `sum`, `max`, `min` or HLO's opcode for another one; None if it does not reduce.
        inputs: Arrays that one rank contributes.
        outputs: Arrays that one rank receives.
        groups: Participating partitions, numbered row-major over the mesh; for `permute`, (source, target)
            pairs.
        channel: Channel number; None if it has none.
        computation: Name of the enclosing computation.
        start: Position in the computation at which it starts.
        done: Position of its done; equal to `start` if it has none.
        loops: Names of the enclosing loops, outermost first.
        name: Name of the instruction during scheduling.
        op_name: JAX's path of the operation; empty if unknown.
        synchronous: Whether it blocks until it is done. It may have a done at another position nevertheless.
        origins: The origin of each input or merged operation if the text distinguishes them, otherwise a
            common one.
        bucket: The combiner key of its arrays, which restricts merging in XLA; empty if they have none or
            several.
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
    origins: tuple[CollectiveOrigin, ...] = ()
    bucket: str = ""

    @property
    def scopes(self) -> tuple[tuple[str, int], ...]:
        """The distinct phases and plan lines that requested it, in order; empty if no plan did."""
        return tuple(dict.fromkeys(origin.scope for origin in self.origins if origin.scope))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The distinct element types of its inputs, by HLO's names."""
        return tuple(dict.fromkeys(tensor.dtype for tensor in self.inputs))

    @property
    def count(self) -> int:
        """Number of elements that one rank contributes."""
        return sum(tensor.size for tensor in self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes that one rank contributes."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def __str__(self) -> str:
        operation = f"{self.kind}({self.op})" if self.op else self.kind
        shapes = ", ".join(map(str, self.inputs))
        ranks = f"{len(self.groups)} x {len(self.groups[0]) if self.groups else 0} ranks"
        return f"{operation} {shapes} over {ranks}" + (f" in loop {self.loops[-1]}" if self.loops else "")


class Product(msgspec.Struct, frozen=True):
    """A matrix product or convolution, or a fusion with one or several.

    Attributes:
        name: Name of the instruction.
        computation: Name of the enclosing computation.
        position: Position in the computation.
        inputs: Arrays that it reads.
        outputs: Arrays that it writes.
        flops: Floating-point operations: a multiplication and an addition are two. 0 if unknown.
    """

    name: str
    computation: str
    position: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    flops: int = 0


class MemoryMove(msgspec.Struct, frozen=True):
    """An instruction that writes memory without computing a product: a copy, a concatenation, a fusion.

    Attributes:
        kind: The opcode; for a fusion, that of its root.
        name: Name of the instruction.
        computation: Name of the enclosing computation.
        position: Position in the computation.
        outputs: Arrays that it writes; for an update in place, only the part that changes.
        reads: Bytes that it reads; less than the size of its operands if it reads slices.
    """

    kind: str
    name: str
    computation: str
    position: int
    outputs: tuple[Tensor, ...]
    reads: int

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return sum(tensor.nbytes for tensor in self.outputs)


class Loop(msgspec.Struct, frozen=True):
    """A loop.

    Attributes:
        body: Name of the computation of its body.
        computation: Name of the enclosing computation.
        position: Position in the enclosing computation.
        trips: Number of iterations; None if unknown.
        name: Name of the instruction during scheduling.
    """

    body: str
    computation: str
    position: int
    trips: int | None = None
    name: str = ""


class CompiledStep(msgspec.Struct, frozen=True):
    """A compiled step as in its scheduled HLO.

    Loops, collectives, products and moves are in order of issue. The contents of a loop body or of a called
    computation are listed once, at the position of the loop or call.

    Attributes:
        entry: Name of the entry computation.
        loops: The loops.
        collectives: The collectives.
        products: The matrix products and convolutions.
        moves: The other instructions that write memory.
        ops: Opcode and number of instructions, sorted by opcode. Loops, calls, conditionals, dones of
            asynchronous operations, and instructions that write no memory, such as tuples, do not count.
        fused_ops: As `ops`, with fusions replaced by their instructions.
    """

    entry: str
    loops: tuple[Loop, ...]
    collectives: tuple[CompiledCollective, ...]
    products: tuple[Product, ...]
    moves: tuple[MemoryMove, ...]
    ops: tuple[tuple[str, int], ...]
    fused_ops: tuple[tuple[str, int], ...]

    def trips(self, collective: CompiledCollective) -> int:
        """Number of executions of `collective` in a step. A loop whose trip count is unknown counts once."""
        loop_of_body = {loop.body: loop for loop in self.loops}
        times, computation = 1, collective.computation
        while computation in loop_of_body:
            times *= loop_of_body[computation].trips or 1
            computation = loop_of_body[computation].computation
        return times

    def hidden(self, collective: CompiledCollective) -> tuple[Product, ...]:
        """The products issued between the start and the done of `collective`."""
        return tuple(
            product
            for product in self.products
            if product.computation == collective.computation
            and collective.start < product.position < collective.done
        )

    @property
    def covered(self) -> float:
        """The fraction of all collective bytes with a product between start and done; 0 without bytes.

        Collectives in loops count once.
        """
        total = sum(collective.nbytes for collective in self.collectives)
        under = sum(collective.nbytes for collective in self.collectives if self.hidden(collective))
        return under / total if total else 0.0

    def before(self, collective: CompiledCollective) -> int:
        """The number of products of its computation issued before `collective` starts."""
        return sum(
            p.computation == collective.computation and p.position < collective.start for p in self.products
        )

    def copies_of(self, nbytes: int) -> tuple[MemoryMove, ...]:
        """The moves that write at least `nbytes` bytes into one array."""
        return tuple(move for move in self.moves if any(out.nbytes >= nbytes for out in move.outputs))

    def timeline(self) -> str:
        """The order of issue on one line: `P` is a product, `AR>` the start of a collective, `<AR` its done.

        A collective without a done is written `AR`. Loop bodies are enclosed in `( )` and omitted if empty.
        """
        return self._timeline(self.entry)

    def _timeline(self, computation: str) -> str:
        marks = [(p.position, "P") for p in self.products if p.computation == computation]
        for collective in self.collectives:
            if collective.computation != computation:
                continue
            short = "".join(word[0] for word in collective.kind.split("_")).upper()
            if collective.start == collective.done:
                marks.append((collective.start, short))
            else:
                marks += [(collective.start, f"{short}>"), (collective.done, f"<{short}")]
        for loop in self.loops:
            inside = self._timeline(loop.body) if loop.computation == computation else ""
            if inside:
                marks.append((loop.position, f"( {inside} )"))
        return " ".join(mark for _, mark in sorted(marks))
