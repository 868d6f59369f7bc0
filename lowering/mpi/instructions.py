"""What one rank does in a chunk program: a list of instructions with what each waits for.

A program says what all ranks do, round by round. Here it is read for one rank, a buffer and a message size:
transfers become sends and receives of pieces of chunks, and each waits only for the instructions that make
what it reads, or still read what it overwrites. Nothing waits for a round to end: pieces follow each other
through the rounds as fast as they arrive.

The engine (engine/list.cpp) runs such a list. Slots are not filled before the first round: what has not
changed yet is read from the operand, and what arrives to be kept goes to its final place at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commplan.collectives import layout
from commplan.collectives.program import BLOCKED, ChunkProgram, Family, Ints

SEND, RECEIVE, RECEIVE_REDUCE, COPY, ZERO = range(5)
INPUT, OUTPUT, SCRATCH = range(3)

# More instructions than about this many for one buffer and pieces grow instead.
MOST_PIECES = 16_384
_LOCAL_PIECE = 256 * 1024  # bytes of one local copy: messages are looked after between two


class Instruction(NamedTuple):
    """One row of the engine's table; offsets and lengths are bytes.

    send: `src` to `peer`. receive: into `dst`. receive_reduce: `dst` = `src` op what arrives. copy: `src` to
    `dst`. zero: `dst`. `peer` counts `Instructions.peers`, `message` the messages between two ranks.
    """

    what: int
    peer: int
    message: int
    src: int
    src_offset: int
    dst: int
    dst_offset: int
    nbytes: int


@dataclass(frozen=True)
class Instructions:
    """The list of one rank. waits[i]: instructions that must be done before i; always earlier ones.

    peers: ranks of the program. scratch: bytes beside operand and result. last: instructions after which what
    they wrote to the result stays as it is. late: offset and bytes of what else there is of the result.
    rounds: the first instruction of each round of the program.
    """

    code: tuple[Instruction, ...]
    waits: tuple[tuple[int, ...], ...]
    peers: tuple[int, ...]
    scratch: int
    last: tuple[int, ...] = ()
    late: tuple[tuple[int, int], ...] = ()
    rounds: tuple[int, ...] = ()


class Transfer(NamedTuple):
    """A piece that this rank sends (`outgoing`) or receives: elements `lo` to `hi` - 1 of the slots."""

    outgoing: bool
    reduce: bool
    peer: int
    message: int
    lo: int
    hi: int


def transfers(program: ChunkProgram, rank: int, bounds: Ints, piece: int) -> Iterator[list[Transfer]]:
    """What `rank` sends and receives in each round, cut into pieces of at most `piece` elements.

    Both ends of a transfer cut it alike and number their messages alike, so that a number names a message.
    """
    counts: dict[tuple[bool, int], int] = {}
    for each in program.rounds:
        now: list[Transfer] = []
        for send in each:
            for outgoing, peer, lo, hi in of_rank(send, rank, bounds):
                pieces = -(-(hi - lo) // piece)
                first = counts.get((outgoing, peer), 0)
                counts[outgoing, peer] = first + pieces
                cuts = [lo + (hi - lo) * i // pieces for i in range(pieces)] + [hi]
                now += (
                    Transfer(outgoing, send.reduce, peer, first + i, cuts[i], cuts[i + 1])
                    for i in range(pieces)
                )
        yield now


def of_rank(send: Family, rank: int, bounds: Ints) -> Iterator[tuple[bool, int, int, int]]:
    """What `rank` sends (True) or receives: with whom, and the elements `lo` to `hi` - 1 of the slots."""
    mine = np.flatnonzero((send.src == rank) | (send.dst == rank))
    for i in mine.tolist():
        src, dst, chunk = int(send.src[i]), int(send.dst[i]), int(send.chunk[i])
        lo, hi = int(bounds[chunk]), int(bounds[chunk + int(send.count[i])])
        if lo < hi:
            yield (True, dst, lo, hi) if src == rank else (False, src, lo, hi)


def instructions(program: ChunkProgram, rank: int, size: int, itemsize: int, piece: int) -> Instructions:
    """The list of `rank` for slots of `size` elements of `itemsize` bytes.

    size: of the whole; where every rank has a block, `ranks` blocks. piece: bytes of a message, at most;
    rounded down to elements, and more where there would be too many messages.
    """
    bounds = layout.bounds(program.kind, program.ranks, program.chunks, size)
    elements = max(1, max(piece, 2 * size * itemsize // MOST_PIECES) // itemsize)
    rounds = list(transfers(program, rank, bounds, elements))
    return _Builder(program, rank, bounds, itemsize, rounds).build()


class _Builder:
    """The state of the slots while the rounds are read: where each unit lies, who wrote it, who reads it.

    A unit is a run of elements that no transfer of this rank cuts.
    """

    def __init__(
        self, program: ChunkProgram, rank: int, bounds: Ints, itemsize: int, rounds: list[list[Transfer]]
    ) -> None:
        self.kind, self.itemsize, self.rounds = program.kind, itemsize, rounds
        block = program.chunks // program.ranks if program.kind in BLOCKED else 0
        own = (int(bounds[rank * block]), int(bounds[(rank + 1) * block])) if block else (0, int(bounds[-1]))
        self.own = own
        ends = {edge for now in rounds for t in now for edge in (t.lo, t.hi)}
        self.edges = sorted({0, int(bounds[-1]), *own} | ends)
        self.unit = {edge: i for i, edge in enumerate(self.edges)}
        units = len(self.edges) - 1
        # Slots that are no part of the result lie in scratch memory, if there are such slots.
        self.home = SCRATCH if program.kind in ("reduce_scatter", "scatter") else OUTPUT
        self.place: list[int | None] = [None] * units
        self.shift = {INPUT: 0, SCRATCH: 0, self.home: 0}
        first, last = self.unit[own[0]], self.unit[own[1]]
        if program.kind in ("all_gather", "gather"):
            self.place[first:last] = [INPUT] * (last - first)
            self.shift[INPUT] = own[0]
        elif rank == program.root or program.kind in ("all_reduce", "reduce", "reduce_scatter", "swap"):
            self.place = [INPUT] * units
        if self.home == SCRATCH:
            self.shift[OUTPUT] = own[0]
        self.writer = [-1] * units
        self.readers: list[list[tuple[int, int]]] = [
            [] for _ in range(units)
        ]  # instruction, and where it reads
        self.code: list[Instruction] = []
        self.waits: list[tuple[int, ...]] = []
        self.peers: dict[int, int] = {}
        self.scratch = 0

    def build(self) -> Instructions:
        final, starts = self._last_arrivals(), list[int]()
        for now in self.rounds:
            starts.append(len(self.code))
            for t in now:
                if t.outgoing:
                    self._send(t)
            for t in now:
                if not t.outgoing:
                    self._receive(t, final)
        self._finish()
        code, last = tuple(self.code), self._last()
        late = tuple(self._late(set(last)))
        waits, peers = tuple(self.waits), tuple(self.peers)
        return Instructions(code, waits, peers, self.scratch, last, late, tuple(starts))

    def _last(self) -> tuple[int, ...]:
        """Of a result that is the whole: what no later instruction writes any part of again."""
        if self.home == SCRATCH:
            return ()
        left = [row.nbytes for row in self.code]
        for u, i in enumerate(self.writer):
            if i >= 0:
                left[i] -= (self.edges[u + 1] - self.edges[u]) * self.itemsize
        return tuple(i for i, nbytes in enumerate(left) if nbytes == 0)

    def _late(self, last: set[int]) -> Iterator[tuple[int, int]]:
        """Offset and bytes of units whose last instruction has written others that are written again, and of
        a result that is a part of the whole."""
        if self.home == SCRATCH:
            yield 0, (self.own[1] - self.own[0]) * self.itemsize
        for u, i in enumerate(self.writer):
            if self.home == OUTPUT and i not in last:
                yield self.edges[u] * self.itemsize, (self.edges[u + 1] - self.edges[u]) * self.itemsize

    def _last_arrivals(self) -> dict[int, Transfer]:
        """Of each unit of this rank's own block the transfer that brings it last."""
        last: dict[int, Transfer] = {}
        if self.home == SCRATCH:
            for now in self.rounds:
                for t in now:
                    if not t.outgoing and self.own[0] <= t.lo and t.hi <= self.own[1]:
                        last.update((u, t) for u in self._units(t.lo, t.hi))
        return last

    def _units(self, lo: int, hi: int) -> range:
        return range(self.unit[lo], self.unit[hi])

    def _send(self, t: Transfer) -> None:
        place = self._together(t.lo, t.hi)
        i = self._add(SEND, t.lo, t.hi, t, src=place)
        if place != INPUT:
            for u in self._units(t.lo, t.hi):
                self.readers[u].append((i, place))

    def _receive(self, t: Transfer, final: dict[int, Transfer]) -> None:
        units = self._units(t.lo, t.hi)
        to = OUTPUT if all(final.get(u) is t for u in units) else self.home
        if self.kind == "swap" and OUTPUT in {self.place[u] for u in units}:
            to = SCRATCH  # what the slots held is sent in this round: to wait for that could be for ever
        if t.reduce:
            self._add(RECEIVE_REDUCE, t.lo, t.hi, t, src=self._together(t.lo, t.hi), dst=to)
        else:
            self._add(RECEIVE, t.lo, t.hi, t, dst=to)

    def _together(self, lo: int, hi: int) -> int:
        """The buffer that holds lo to hi; where parts lie in several, they are copied home first."""
        units = self._units(lo, hi)
        places = {self.place[u] for u in units}
        if len(places) > 1:
            for place in sorted(p for p in places if p is not None and p != self.home):
                for a, b in self._runs(units, place):
                    self._add(COPY, a, b, src=place, dst=self.home)
            places = {self.place[u] for u in units}
        (place,) = places
        if place is None:
            raise ValueError(f"elements {lo} to {hi} are sent before they have arrived")
        return place

    def _runs(self, units: Iterable[int], place: int | None) -> list[tuple[int, int]]:
        """The runs of units that lie in `place`, as elements, cut to what is copied at a time."""
        most = max(1, _LOCAL_PIECE // self.itemsize)
        runs: list[tuple[int, int]] = []
        for u in units:
            if self.place[u] != place:
                continue
            lo, hi = self.edges[u], self.edges[u + 1]
            if runs and runs[-1][1] == lo and hi - runs[-1][0] <= most:
                runs[-1] = (runs[-1][0], hi)
            else:
                runs.append((lo, hi))
        return runs

    def _add(
        self, kind: int, lo: int, hi: int, t: Transfer | None = None, *, src: int | None = None, dst: int = -1
    ) -> int:
        """One more instruction on elements lo to hi; it waits for what its operands were made by."""
        i, units = len(self.code), self._units(lo, hi)
        before: set[int] = set()
        if src is not None and src != INPUT:
            before.update(self.writer[u] for u in units)
        if dst >= 0:
            for u in units:
                before.add(self.writer[u])
                before.update(reader for reader, place in self.readers[u] if place == dst)
                self.readers[u] = [each for each in self.readers[u] if each[1] != dst]
                self.writer[u], self.place[u] = i, dst
        before.discard(-1)
        peer = self.peers.setdefault(t.peer, len(self.peers)) if t else 0
        at = INPUT if src is None else src
        if SCRATCH in (at, dst):
            self.scratch = max(self.scratch, hi * self.itemsize)
        source = (lo - self.shift[at]) * self.itemsize if src is not None else 0
        target = (lo - self.shift[dst]) * self.itemsize if dst >= 0 else 0
        message, nbytes = t.message if t else 0, (hi - lo) * self.itemsize
        self.code.append(Instruction(kind, peer, message, at, source, max(dst, 0), target, nbytes))
        self.waits.append(tuple(sorted(before)))
        return i

    def _finish(self) -> None:
        """What of the result has not been written yet."""
        units = self._units(*self.own) if self.home == SCRATCH else range(len(self.place))
        for place in (INPUT, SCRATCH):
            for lo, hi in self._runs(units, place):
                self._add(COPY, lo, hi, src=place, dst=OUTPUT)
        for lo, hi in self._runs(units, None):
            self._add(ZERO, lo, hi, dst=OUTPUT)
