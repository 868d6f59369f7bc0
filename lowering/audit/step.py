"""What a compiled step really does: its collectives, matrix products and copies, in the order of issue."""

from __future__ import annotations

import re

import msgspec

from commplan.ir.types import sized
from commplan.lowering.audit.hlo import Tensor

_SCOPE = re.compile(r"commplan\)*/([^/:()]+)\)*/line(\d+)")


class Origin(msgspec.Struct, frozen=True):
    """Where an array of a collective comes from: JAX's `op_name`, and `file:line` of the user's code."""

    op_name: str
    source: str = ""

    @property
    def scope(self) -> tuple[str, int] | None:
        """The phase and the plan line that asked for it; None where no plan did."""
        match = _SCOPE.search(self.op_name)
        return (match[1], int(match[2])) if match else None

    @property
    def primitive(self) -> str:
        """What it is in JAX, such as `psum`."""
        return self.op_name.rpartition("/")[2].strip("()").removesuffix("_invariant")

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"`{self.primitive}`{at}"


class Memory(msgspec.Struct, frozen=True):
    """What a compiled step takes of the memory of one device, in bytes, as XLA counts it.

    arguments: all that it is given; outputs: of its results; donated: the bytes of those that lie where
    arguments lay; temporary: what it needs beside both while it runs.
    """

    arguments: int
    outputs: int
    donated: int
    temporary: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.arguments + self.outputs - self.donated + self.temporary

    def __str__(self) -> str:
        results = f"{sized(self.outputs)} of results"
        results += f" ({sized(self.donated)} of them where arguments lay)" if self.donated else ""
        parts = f"{sized(self.arguments)} of arguments, {results}, {sized(self.temporary)} temporary"
        return f"memory of a device: {sized(self.total)}: {parts}"


class CompiledCollective(msgspec.Struct, frozen=True):
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
    origins: tuple[Origin, ...] = ()
    """Of each of `inputs` or each merged operation, if the text tells them apart; else of all together."""
    bucket: str = ""
    """The key by which XLA was to combine its arrays and no others; "" where they have none, or several."""

    @property
    def scopes(self) -> tuple[tuple[str, int], ...]:
        """The phases and plan lines that its arrays come from."""
        return tuple(dict.fromkeys(origin.scope for origin in self.origins if origin.scope))

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
        operation = f"{self.kind}({self.op})" if self.op else self.kind
        shapes = ", ".join(map(str, self.inputs))
        ranks = f"{len(self.groups)} x {len(self.groups[0]) if self.groups else 0} ranks"
        return f"{operation} {shapes} over {ranks}" + (f" in loop {self.loops[-1]}" if self.loops else "")


class Product(msgspec.Struct, frozen=True):
    """A matrix product or convolution, or a fusion of several: where it stands and what it makes.

    `flops` counts a multiplication and an addition as two; 0 where the text does not tell.
    """

    name: str
    computation: str
    position: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    flops: int = 0


class Move(msgspec.Struct, frozen=True):
    """An instruction that writes memory without computing a product: a copy, a concatenation, a fusion.

    `kind` is the opcode; for a fusion, the opcode of its root. `outputs` are the arrays that it writes;
    `reads` the bytes that it reads of its operands, where slices of them are taken less than their size.
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
    """A loop: the name of its body, its position in which computation, its trip count, and its own name.

    `trips` is None where the text does not tell.
    """

    body: str
    computation: str
    position: int
    trips: int | None = None
    name: str = ""


class CompiledStep(msgspec.Struct, frozen=True):
    """A compiled step as its scheduled HLO has it. Everything is in the order of issue."""

    entry: str
    loops: tuple[Loop, ...]
    collectives: tuple[CompiledCollective, ...]
    products: tuple[Product, ...]
    moves: tuple[Move, ...]
    ops: tuple[tuple[str, int], ...]
    """Opcode and count of all instructions that run (names, constants and tuples left out)."""
    fused_ops: tuple[tuple[str, int], ...]
    """The same with the instructions inside fusions in place of the fusions."""

    def trips(self, collective: CompiledCollective) -> int:
        """How often `collective` runs in a step; once in a loop whose trips the text does not tell."""
        around = {loop.body: loop for loop in self.loops}
        times, computation = 1, collective.computation
        while computation in around:
            times *= around[computation].trips or 1
            computation = around[computation].computation
        return times

    def hidden(self, collective: CompiledCollective) -> tuple[Product, ...]:
        """The products that are issued between the start and the done of `found`."""
        return tuple(
            product
            for product in self.products
            if product.computation == collective.computation
            and collective.start < product.position < collective.done
        )

    @property
    def covered(self) -> float:
        """The share of all bytes given to collectives that has a product between start and done."""
        total = sum(collective.nbytes for collective in self.collectives)
        under = sum(collective.nbytes for collective in self.collectives if self.hidden(collective))
        return under / total if total else 0.0

    def before(self, collective: CompiledCollective) -> int:
        """How many products of its computation are issued before `found` starts."""
        return sum(
            p.computation == collective.computation and p.position < collective.start for p in self.products
        )

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
