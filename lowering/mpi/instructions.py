"""Translates a chunk program into the instruction list of one rank.

A program describes the transfers of all ranks, round by round. For one rank, a buffer and a message size,
transfers become sends and receives of pieces of chunks. An instruction waits only for those that produce its
source, and for those that still read its destination. There is no barrier between rounds: pieces proceed as
soon as they arrive.

The engine (engine/list.cpp) runs such a list. The operand is not copied into the slots first: unchanged
elements are read from the operand, and received elements are written directly to the result where possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commplan.collectives import layout
from commplan.collectives.program import ChunkProgram, Family, Ints
from commplan.ir.collective_kinds import BLOCKED, GATHERING, REDUCING, SCATTERING

# The dtypes of reductions, in the order of the enum `DType` of the engine.
DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")

# Kinds of instructions, as in the enum `InstructionKind` of the engine.
SEND = 0
RECEIVE = 1
RECEIVE_REDUCE = 2
COPY = 3
ZERO = 4
# Buffers, as in the enum `Buffer` of the engine.
INPUT = 0
OUTPUT = 1
SCRATCH = 2

# Beyond about this many instructions for one buffer, larger pieces are used.
MOST_PIECES = 16_384
_LOCAL_PIECE = 256 * 1024  # bytes per local copy; the engine polls for messages in between


class Instruction(NamedTuple):
    """A row of the engine's table.

    - send: `src` to `peer`.
    - receive: from `peer` into `dst`.
    - receive_reduce: `dst` = `src` op received.
    - copy: `src` to `dst`.
    - zero: `dst`.

    Attributes:
        kind: The kind of instruction.
        peer: The other rank of a message, an index into `Instructions.peers`; 0 without a message.
        message: The number of the message among those from its sender to its receiver; 0 without a message.
        src: The buffer that it reads; `INPUT` if it reads none.
        src_offset: The first byte that it reads in `src`.
        dst: The buffer that it writes; `INPUT` if it writes none.
        dst_offset: The first byte that it writes in `dst`.
        nbytes: The number of bytes.
    """

    kind: int
    peer: int
    message: int
    src: int
    src_offset: int
    dst: int
    dst_offset: int
    nbytes: int


@dataclass(frozen=True)
class Instructions:
    """The instruction list of one rank.

    Attributes:
        code: The instructions, in the order in which they are tried.
        waits: For each instruction, the earlier instructions that must complete before it, in ascending
            order.
        peers: The ranks of the program that this rank communicates with.
        scratch: Bytes of scratch memory.
        last: Instructions whose whole output is part of the result and final.
        late: Offset and bytes of the remaining parts of the result, final only when the list is complete.
        rounds: The first instruction of each round of the program.
    """

    code: tuple[Instruction, ...]
    waits: tuple[tuple[int, ...], ...]
    peers: tuple[int, ...]
    scratch: int
    last: tuple[int, ...] = ()
    late: tuple[tuple[int, int], ...] = ()
    rounds: tuple[int, ...] = ()


class PieceTransfer(NamedTuple):
    """A piece of a transfer, which is one message.

    Attributes:
        outgoing: Whether this rank sends it; otherwise it receives it.
        reduce: Whether the receiver combines it with its own elements.
        peer: The other rank.
        message: The number of the message among those from its sender to its receiver.
        lo, hi: Elements `lo` to `hi - 1` of the whole buffer.
    """

    outgoing: bool
    reduce: bool
    peer: int
    message: int
    lo: int
    hi: int


def transfers(program: ChunkProgram, rank: int, bounds: Ints, piece: int) -> Iterator[list[PieceTransfer]]:
    """The transfers of one rank in each round, in pieces.

    Both ends of a transfer cut and number its messages in the same way, so a number identifies a message.

    Args:
        program: The chunk program.
        rank: The rank.
        bounds: The offset of each chunk in elements, and the number of elements; [chunks + 1].
        piece: The maximum number of elements of a piece.
    """
    counts: dict[tuple[bool, int], int] = {}
    for sends in program.rounds:
        transfers_of_round: list[PieceTransfer] = []
        for send in sends:
            for outgoing, peer, lo, hi in transfers_of_rank(send, rank, bounds):
                pieces = -(-(hi - lo) // piece)
                first = counts.get((outgoing, peer), 0)
                counts[outgoing, peer] = first + pieces
                cuts = [lo + (hi - lo) * i // pieces for i in range(pieces)] + [hi]
                transfers_of_round += (
                    PieceTransfer(outgoing, send.reduce, peer, first + i, cuts[i], cuts[i + 1])
                    for i in range(pieces)
                )
        yield transfers_of_round


def transfers_of_rank(send: Family, rank: int, bounds: Ints) -> Iterator[tuple[bool, int, int, int]]:
    """The transfers of `rank` in `send`, without empty ones.

    Yields:
        Whether it sends, the peer, and the range of elements `lo` to `hi - 1` of the whole buffer.
    """
    indices = np.flatnonzero((send.src == rank) | (send.dst == rank))
    for i in indices.tolist():
        src, dst, chunk = int(send.src[i]), int(send.dst[i]), int(send.chunk[i])
        lo = int(bounds[chunk])
        hi = int(bounds[chunk + int(send.count[i])])
        if lo < hi:
            yield (True, dst, lo, hi) if src == rank else (False, src, lo, hi)


def instructions(program: ChunkProgram, rank: int, size: int, itemsize: int, piece: int) -> Instructions:
    """The instruction list of `rank`.

    Args:
        program: The chunk program.
        rank: The rank, 0 to `program.ranks` - 1.
        size: Elements of the whole buffer. If every rank has a block, this is `ranks` blocks.
        itemsize: Bytes per element.
        piece: The maximum number of bytes per message. It is rounded down to whole elements, and exceeded if
            there would be too many messages.
    """
    bounds = layout.bounds(program.kind, program.ranks, program.chunks, size)
    elements = max(1, max(piece, 2 * size * itemsize // MOST_PIECES) // itemsize)
    rounds = list(transfers(program, rank, bounds, elements))
    return _Builder(program, rank, bounds, itemsize, rounds).build()


class _Builder:
    """Translates the transfers of one rank.

    The slots, which hold the whole buffer, are split into units: runs of elements that no transfer of this
    rank splits.

    Attributes:
        block: The first element of this rank's block, and its end; of all slots if there are no blocks.
        edges: The first element of each unit, and the end of the last one.
        unit: The unit that begins at an element.
        work_buffer: The buffer that stands for the slots: the result, or scratch memory if the result is one
            block of the slots.
        buffer_of: By unit, the buffer with its current value; None before it is received.
        shift: By buffer, the element of the slots at its begin.
        writer: By unit, the last instruction that writes it; -1 for none.
        readers: By unit, the instructions that read it, and the buffers from which they read.
    """

    def __init__(
        self, program: ChunkProgram, rank: int, bounds: Ints, itemsize: int, rounds: list[list[PieceTransfer]]
    ) -> None:
        self.kind, self.itemsize, self.rounds = program.kind, itemsize, rounds
        chunks = program.chunks // program.ranks if program.kind in BLOCKED else 0
        first, end = (rank * chunks, (rank + 1) * chunks) if chunks else (0, -1)
        lo, hi = self.block = int(bounds[first]), int(bounds[end])
        ends = {edge for round_transfers in rounds for t in round_transfers for edge in (t.lo, t.hi)}
        self.edges = sorted({0, int(bounds[-1]), lo, hi} | ends)
        self.unit = {edge: i for i, edge in enumerate(self.edges)}
        units = len(self.edges) - 1
        # The slots of a scattered result include elements of other ranks, which are kept in scratch memory.
        self.work_buffer = SCRATCH if program.kind in SCATTERING else OUTPUT
        self.buffer_of: list[int | None] = [None] * units
        self.shift = {INPUT: 0, SCRATCH: 0, self.work_buffer: 0}
        first, last = self.unit[lo], self.unit[hi]
        if program.kind in GATHERING:
            self.buffer_of[first:last] = [INPUT] * (last - first)
            self.shift[INPUT] = lo
        elif rank == program.root or program.kind in (*REDUCING, "swap"):
            self.buffer_of = [INPUT] * units
        if self.work_buffer == SCRATCH:
            self.shift[OUTPUT] = lo
        self.writer = [-1] * units
        self.readers: list[list[tuple[int, int]]] = [[] for _ in range(units)]
        self.code: list[Instruction] = []
        self.waits: list[tuple[int, ...]] = []
        self.peers: dict[int, int] = {}
        self.scratch = 0

    def build(self) -> Instructions:
        """Translate all rounds. The sends of a round come before its receives."""
        final = self._last_arrivals()
        starts: list[int] = []
        for round_transfers in self.rounds:
            starts.append(len(self.code))
            for t in round_transfers:
                if t.outgoing:
                    self._send(t)
            for t in round_transfers:
                if not t.outgoing:
                    self._receive(t, final)
        self._finish()
        code = tuple(self.code)
        last = self._last()
        late = tuple(self._late(set(last)))
        waits, peers = tuple(self.waits), tuple(self.peers)
        return Instructions(code, waits, peers, self.scratch, last, late, tuple(starts))

    def _last(self) -> tuple[int, ...]:
        """Instructions whose output no later instruction overwrites; none if the result is one block."""
        if self.work_buffer == SCRATCH:
            return ()
        outstanding = [row.nbytes for row in self.code]
        for u, i in enumerate(self.writer):
            if i >= 0:
                outstanding[i] -= (self.edges[u + 1] - self.edges[u]) * self.itemsize
        return tuple(i for i, nbytes in enumerate(outstanding) if nbytes == 0)

    def _late(self, last: set[int]) -> Iterator[tuple[int, int]]:
        """Offset and bytes of the parts of the result that `_last` does not cover."""
        if self.work_buffer == SCRATCH:
            yield 0, (self.block[1] - self.block[0]) * self.itemsize
        for u, i in enumerate(self.writer):
            if self.work_buffer == OUTPUT and i not in last:
                yield self.edges[u] * self.itemsize, (self.edges[u + 1] - self.edges[u]) * self.itemsize

    def _last_arrivals(self) -> dict[int, PieceTransfer]:
        """For each unit of this rank's block, the transfer that brings its last value."""
        last: dict[int, PieceTransfer] = {}
        if self.work_buffer == SCRATCH:
            for round_transfers in self.rounds:
                for t in round_transfers:
                    if not t.outgoing and self.block[0] <= t.lo and t.hi <= self.block[1]:
                        last.update((u, t) for u in self._units(t.lo, t.hi))
        return last

    def _units(self, lo: int, hi: int) -> range:
        """The units of elements `lo` to `hi - 1`."""
        return range(self.unit[lo], self.unit[hi])

    def _send(self, t: PieceTransfer) -> None:
        buffer = self._gather(t.lo, t.hi)
        i = self._add(SEND, t.lo, t.hi, t, src=buffer)
        if buffer != INPUT:
            for u in self._units(t.lo, t.hi):
                self.readers[u].append((i, buffer))

    def _receive(self, t: PieceTransfer, final: dict[int, PieceTransfer]) -> None:
        units = self._units(t.lo, t.hi)
        # The last values of a scattered block are received directly into the result.
        buffer = OUTPUT if all(final.get(u) is t for u in units) else self.work_buffer
        if self.kind == "swap" and OUTPUT in {self.buffer_of[u] for u in units}:
            buffer = SCRATCH  # waiting for sends of this round into the same slots could deadlock
        if t.reduce:
            self._add(RECEIVE_REDUCE, t.lo, t.hi, t, src=self._gather(t.lo, t.hi), dst=buffer)
        else:
            self._add(RECEIVE, t.lo, t.hi, t, dst=buffer)

    def _gather(self, lo: int, hi: int) -> int:
        """The buffer with elements `lo` to `hi - 1`. If they are in several, copies them to one first.

        Raises:
            ValueError: If an element has not been received yet, which a proved program excludes.
        """
        units = self._units(lo, hi)
        buffers = {self.buffer_of[u] for u in units}
        if len(buffers) > 1:
            for buffer in sorted(b for b in buffers if b is not None and b != self.work_buffer):
                for first, end in self._runs(units, buffer):
                    self._add(COPY, first, end, src=buffer, dst=self.work_buffer)
            buffers = {self.buffer_of[u] for u in units}
        (buffer,) = buffers
        if buffer is None:
            raise ValueError(f"elements {lo} to {hi} are sent before they have arrived")
        return buffer

    def _runs(self, units: Iterable[int], buffer: int | None) -> list[tuple[int, int]]:
        """The runs of adjacent `units` whose value is in `buffer`, as ranges of elements.

        A run is cut at `_LOCAL_PIECE` bytes, unless it is one unit.
        """
        most = max(1, _LOCAL_PIECE // self.itemsize)
        runs: list[tuple[int, int]] = []
        for u in units:
            if self.buffer_of[u] != buffer:
                continue
            lo, hi = self.edges[u], self.edges[u + 1]
            if runs and runs[-1][1] == lo and hi - runs[-1][0] <= most:
                runs[-1] = (runs[-1][0], hi)
            else:
                runs.append((lo, hi))
        return runs

    def _add(
        self,
        kind: int,
        lo: int,
        hi: int,
        t: PieceTransfer | None = None,
        *,
        src: int | None = None,
        dst: int = -1,
    ) -> int:
        """Append an instruction that waits for writers of its source and for users of its destination.

        Args:
            kind: The kind of instruction.
            lo, hi: It is on elements `lo` to `hi - 1` of the whole buffer.
            t: The message; None if it has none.
            src: The buffer that it reads; None if it reads none.
            dst: The buffer that it writes; -1 if it writes none.

        Returns:
            Its index.
        """
        i = len(self.code)
        units = self._units(lo, hi)
        before: set[int] = set()
        if src is not None and src != INPUT:
            before.update(self.writer[u] for u in units)
        if dst >= 0:
            for u in units:
                before.add(self.writer[u])
                before.update(reader for reader, buffer in self.readers[u] if buffer == dst)
                self.readers[u] = [access for access in self.readers[u] if access[1] != dst]
                self.writer[u], self.buffer_of[u] = i, dst
        before.discard(-1)
        peer = self.peers.setdefault(t.peer, len(self.peers)) if t else 0
        if SCRATCH in (src, dst):
            self.scratch = max(self.scratch, hi * self.itemsize)
        src_offset = (lo - self.shift[src]) * self.itemsize if src is not None else 0
        dst_offset = (lo - self.shift[dst]) * self.itemsize if dst >= 0 else 0
        message, nbytes = t.message if t else 0, (hi - lo) * self.itemsize
        source = INPUT if src is None else src
        self.code.append(
            Instruction(kind, peer, message, source, src_offset, max(dst, 0), dst_offset, nbytes)
        )
        self.waits.append(tuple(sorted(before)))
        return i

    def _finish(self) -> None:
        """Copy the rest of the result to the output; zero the elements that this rank does not receive."""
        units = self._units(*self.block) if self.work_buffer == SCRATCH else range(len(self.buffer_of))
        for buffer in (INPUT, SCRATCH):
            for lo, hi in self._runs(units, buffer):
                self._add(COPY, lo, hi, src=buffer, dst=OUTPUT)
        for lo, hi in self._runs(units, None):
            self._add(ZERO, lo, hi, dst=OUTPUT)
