"""Post-conditions: what every slot of every rank holds, as a sum of the ranks' contributions.

A slot holds nothing, the contribution of one rank, or the sum of two such values. Sums are hash-consed: equal
numbers mean equal sums in equal order, up to exchanging the two operands, which for floating point is to say
bit by bit equal. Both ends of a message are one transfer, of the same chunks in the same round, so that the
slots for chunk c only ever hold contributions to chunk c; and round t completes once all before it have, so
that no rank waits for ever.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, cast

import numpy as np

from commplan.collectives.postcondition import postcondition, sources
from commplan.collectives.program import REDUCING, ROOTED, Bools, ChunkProgram, Ints, Rotation, Send
from commplan.collectives.transform import expand_runs
from commplan.verify.programs.counterexample import Counterexample, terms

_HALF = 32  # bits of a sum's number in a key
NOTHING = 0  # r + 1 is the contribution of rank r
ANY, SUM = -1, 0  # what is wanted: whatever, or the sum of all contributions; else as above


class Transfers(NamedTuple):
    """The transfers of a program, one entry each: as in `Send`, and the round of each."""

    src: Ints
    dst: Ints
    chunk: Ints
    size: Ints
    reduce: Bools
    round: Ints

    @classmethod
    def of(cls, program: ChunkProgram) -> Transfers:
        """Those of `program`, in the order in which it lists them."""
        timed = [(time, send) for time, sends in enumerate(program.rounds) for send in sends]
        sizes = [len(send.src) for _, send in timed]
        nothing = np.zeros(0, np.int64)
        src, dst, chunk, count = (
            np.concatenate([nothing, *(getattr(send, name) for _, send in timed)])
            for name in ("src", "dst", "chunk", "count")
        )
        reduce = np.repeat(np.array([send.reduce for _, send in timed], np.bool_), sizes)
        time = np.repeat(np.array([time for time, _ in timed], np.int64), sizes)
        return cls(src, dst, chunk, count, reduce, time)

    @classmethod
    def of_first_chunk(cls, program: ChunkProgram) -> Transfers:
        """Those of chunk 0, one for each rotation and each chunk of its runs. `program` has nothing but
        rotations."""
        timed = [(time, send) for time, sends in enumerate(program.rounds) for send in sends]
        of = [send for _, send in timed if isinstance(send, Rotation)]
        assert len(of) == len(timed), "a family of transfers is no rotation"
        columns = [
            (each.step, each.first, each.reduce, time) for each, (time, _) in zip(of, timed, strict=True)
        ]
        length = np.array([each.length for each in of], np.int64)
        step, first, reduce, time = np.repeat(np.array(columns, np.int64).reshape(-1, 4), length, axis=0).T
        place = np.arange(len(first)) - np.repeat(np.cumsum(length) - length, length)
        src = -(first + place) % program.ranks  # the one rank whose chunk at this place of the run is chunk 0
        dst = (src + step) % program.ranks
        return cls(src, dst, np.zeros_like(src), np.ones_like(src), reduce.astype(np.bool_), time)

    def take(self, order: Ints) -> Transfers:
        """The entries `order`."""
        return Transfers(*(column[order] for column in cast("tuple[Any, ...]", self)))


class Units(NamedTuple):
    """Messages taken apart: one entry for each chunk of each message, in the order of `write`.

    source, target: the slot rank * chunks + chunk. read, write: times, 0 (before all) and up; the sender's
    slots are read after all that is written at `read` and before what is written later. sent_in, received_in:
    the rounds of the two ends.
    """

    source: Ints
    target: Ints
    reduce: Bools
    read: Ints
    write: Ints
    sent_in: Ints
    received_in: Ints


class Sums:
    """Numbers of values: 0 is nothing, r + 1 the contribution of rank r, further ones are sums."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.terms = [0, *(1 << rank for rank in range(ranks))]  # the set of ranks in each, as bits
        self._numbers: dict[int, int] = {}

    def add(self, left: Ints, right: Ints) -> Ints:
        """The sums, element by element; -1 where both hold the contribution of the same rank."""
        keys = (np.minimum(left, right) << _HALF) | np.maximum(left, right)
        keys, places = np.unique(keys, return_inverse=True)
        sums = [self._number(key) for key in keys.tolist()]
        return np.array(sums, np.int64)[places]

    def _number(self, key: int) -> int:
        known = self._numbers.get(key)
        if known is not None:
            return known
        left, right = self.terms[key >> _HALF], self.terms[key & ((1 << _HALF) - 1)]
        number = -1 if left & right else len(self.terms)
        if number > 0:
            self.terms.append(left | right)
        self._numbers[key] = number
        return number

    def counts(self, *numbers: int) -> dict[int, int]:
        """Rank -> how often it is in the values `numbers` together."""
        bits = [self.terms[number] for number in numbers]
        every = (sum((term >> rank) & 1 for term in bits) for rank in range(self.ranks))
        return {rank: count for rank, count in enumerate(every) if count}


def representatives(program: ChunkProgram) -> tuple[Transfers, int]:
    """The transfers that stand for all, and how many chunks, from chunk 0 on, stand for all.

    If `rotates`, they are those of chunk 0: as many as rank 0 sends, and in every round as many.
    """
    if rotates(program):
        return Transfers.of_first_chunk(program), 1
    transfers = Transfers.of(program)
    return transfers, orbit(program, transfers)


def interpret(program: ChunkProgram, transfers: Transfers, few: int) -> Counterexample | None:
    """What goes wrong first, if anything does. transfers, few: the `representatives`."""
    return follow(program, _units(program, transfers), few)


def follow(program: ChunkProgram, units: Units, few: int) -> Counterexample | None:
    """What goes wrong first in chunks 0 to `few` - 1, which stand for all."""
    if few < program.chunks:
        (source, chunk), (target, _) = (divmod(slot, program.chunks) for slot in (units.source, units.target))
        renumbered = units._replace(source=source * few + chunk, target=target * few + chunk)
        units = Units(*(column[chunk < few] for column in cast("tuple[Any, ...]", renumbered)))
    race = _race(units, few)
    if race is not None:
        return race
    run = _Run(program, units, few)
    return run.forward() or run.result() or run.useless()


def orbit(program: ChunkProgram, transfers: Transfers) -> int:
    """How many chunks, from chunk 0 on, stand for all.

    Where every rank r does what rank 0 does with all ranks and chunks moved on by r and by r blocks, and the
    promise is the same for all ranks, what is proved of the chunks of one block is proved of all. A ring
    turns so; most programs do not.
    """
    n, k = program.ranks, program.chunks
    if not _rotates_promise(program) or not len(transfers.src) or len(transfers.src) % n:
        return k
    block, rank = k // n, np.arange(n, dtype=np.int64)[:, None]
    by_sender = transfers.take(np.lexsort((transfers.round, transfers.src)))
    src, dst, chunk, *same = (column.reshape(n, -1) for column in by_sender)
    moved = (dst - rank) % n, (chunk - rank * block) % k
    turns = (src == rank).all() and all((column == column[0]).all() for column in (*same, *moved))
    return block if turns else k


def rotates(program: ChunkProgram) -> bool:
    """Whether chunk 0 stands for all because of how `program` is written: as rotations alone.

    A rotation gives every rank r the transfer of rank 0 with all ranks and chunks moved on by r. So each
    round, and with it the whole program, is the same after all ranks and chunks are moved on by one, and so
    is the promise. Moving on by c takes chunk 0 to chunk c. A program in which a single rank differs cannot
    be written as rotations.
    """
    alike = (
        isinstance(each, Rotation) and each.ranks == program.ranks for now in program.rounds for each in now
    )
    return program.chunks == program.ranks and _rotates_promise(program) and all(alike)


def _rotates_promise(program: ChunkProgram) -> bool:
    """Whether the promise is the same after all ranks and blocks of chunks are moved on by one. That of a
    swap is not: its slots are counted by distance."""
    unlike = program.kind in ROOTED or program.kind == "swap"
    return not unlike and program.ranks > 1 and program.chunks % program.ranks == 0


def _units(program: ChunkProgram, transfers: Transfers) -> Units:
    transfers = transfers.take(np.lexsort((transfers.dst, transfers.src, transfers.round)))
    k, many = program.chunks, transfers.size
    src, dst, chunk = expand_runs(Send(*transfers[:4], reduce=False))
    reduce, time = np.repeat(transfers.reduce, many), np.repeat(transfers.round, many)
    return Units(src * k + chunk, dst * k + chunk, reduce, time, time + 1, time, time)


def _race(units: Units, chunks: int) -> Counterexample | None:
    """Two messages that one rank receives into one slot in one round. chunks: those that each rank has."""
    width = int(units.received_in.max(initial=0)) + 1
    keys = units.target * width + units.received_in
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if not len(same):
        return None
    first = min(same.tolist(), key=lambda place: int(units.write[order[place]]))
    first_unit, second_unit = int(order[first]), int(order[first + 1])
    rank, chunk = divmod(int(units.target[first_unit]), chunks)
    peers = [int(units.source[unit]) // chunks for unit in (first_unit, second_unit)]
    hows = ["reduce" if units.reduce[unit] else "copy" for unit in (first_unit, second_unit)]
    time = int(units.received_in[first_unit])
    return Counterexample(
        "race", (rank, *peers), (time,), chunk, "one message into a slot in a round",
        f"{hows[0]} from rank {peers[0]}, {hows[1]} from rank {peers[1]}",
        f"rank {rank} receives chunk {chunk} twice in its round {time}: what it holds then depends on which"
        " comes first",
    )  # fmt: skip


class _Run:
    """One symbolic execution: forward for what slots hold, backward for what mattered."""

    def __init__(self, program: ChunkProgram, units: Units, few: int) -> None:
        self.program, self.units, self.chunks, self.alike = program, units, few, program.chunks // few
        self.sums = Sums(program.ranks)
        starts, ends = postcondition(program.kind, program.ranks, program.chunks, program.root, few=few)
        rank = np.arange(1, program.ranks + 1, dtype=np.int64)[:, None]
        source = SUM if program.kind in REDUCING else sources(program, few) + 1
        self.holds = np.where(starts, rank, NOTHING).ravel()
        self.wanted = np.where(ends, source, ANY).ravel()
        self.last = int(units.write.max(initial=0))
        self.same = np.zeros(len(units.source), np.bool_)  # units that bring what is there already
        by_read = np.argsort(units.read, kind="stable")
        edges = np.arange(self.last + 2)
        starts = np.searchsorted(units.read[by_read], edges).tolist()
        self.reads = [by_read[start:stop] for start, stop in itertools.pairwise(starts)]
        self.writes: list[int] = np.searchsorted(units.write, edges).tolist()

    def forward(self) -> Counterexample | None:
        """Execute; stops at the first contribution that is missing or added twice."""
        units, holds = self.units, self.holds
        carried = np.zeros(len(units.source), np.int64)
        for time in range(self.last + 1):
            start, stop = self.writes[time], self.writes[time + 1]
            if start < stop:
                wrong = self._write(slice(start, stop), carried)
                if wrong is not None:
                    return wrong
            now = self.reads[time]
            carried[now] = holds[units.source[now]]
            empty = now[carried[now] == NOTHING]
            if len(empty):
                return self._unset(int(empty[0]), sends=True)
        return None

    def _write(self, now: slice, carried: Ints) -> Counterexample | None:
        target, reduce, coming = self.units.target[now], self.units.reduce[now], carried[now]
        held = self.holds[target]
        self.same[now] = ~reduce & (held == coming)
        if not reduce.any():
            self.holds[target] = coming
            return None
        empty = np.flatnonzero(reduce & (held == NOTHING))
        if len(empty):
            return self._unset(now.start + int(empty[0]), sends=False)
        added = self.sums.add(held[reduce], coming[reduce])
        double = np.flatnonzero(added < 0)
        if len(double):
            place = int(np.flatnonzero(reduce)[double[0]])
            return self._double(now.start + place, int(held[place]), int(coming[place]))
        new = coming.copy()
        new[reduce] = added
        self.holds[target] = new
        return None

    def _place(self, slot: int) -> tuple[int, int]:
        return divmod(slot, self.chunks)

    def _ends(self, unit: int, *, sends: bool = False) -> tuple[int, int, int, int]:
        """The rank that receives a unit, or sends it; the other one; the round of the first; the chunk."""
        ends = self._place(int(self.units.target[unit])), self._place(int(self.units.source[unit]))
        (rank, chunk), (peer, _) = reversed(ends) if sends else ends
        time = int(self.units.sent_in[unit] if sends else self.units.received_in[unit])
        return rank, peer, time, chunk

    def _unset(self, unit: int, *, sends: bool) -> Counterexample:
        rank, peer, time, chunk = self._ends(unit, sends=sends)
        action = f"sends chunk {chunk} to rank {peer}" if sends else f"adds to chunk {chunk} from rank {peer}"
        return Counterexample(
            "unset", (rank, peer), (time,), chunk, "a value in the slot", "nothing",
            f"rank {rank} {action} in its round {time}, and holds nothing there yet",
        )  # fmt: skip

    def _double(self, unit: int, held: int, coming: int) -> Counterexample:
        rank, peer, time, chunk = self._ends(unit)
        counts = self.sums.counts(held, coming)
        twice = terms({source: count for source, count in counts.items() if count > 1})
        return Counterexample(
            "double", (rank, peer), (time,), chunk, "every contribution once", terms(counts),
            f"rank {rank} adds chunk {chunk} from rank {peer} in its round {time}, and then holds {twice}",
        )  # fmt: skip

    def result(self) -> Counterexample | None:
        """What slots hold at the end against what the collective promises."""
        n, k = self.program.ranks, self.chunks
        everything = (1 << n) - 1
        full = np.array([bits == everything for bits in self.sums.terms], np.bool_)
        fine = np.where(self.wanted == SUM, full[self.holds], self.holds == self.wanted)
        wrong = np.flatnonzero(~fine & (self.wanted != ANY))
        if len(wrong):
            return self._wrong(int(wrong[0]), len(wrong) * self.alike)
        holds, sums = self.holds.reshape(n, k), (self.wanted == SUM).reshape(n, k)
        firsts = sums.argmax(axis=0)
        unlike = sums & (holds != holds[firsts, np.arange(k)])
        for rank, chunk in np.argwhere(unlike)[:1].tolist():
            return self._order(int(firsts[chunk]), rank, chunk)
        return None

    def _wrong(self, slot: int, count: int) -> Counterexample:
        rank, chunk = self._place(slot)
        wanted, n = int(self.wanted[slot]), self.program.ranks
        expected = terms(dict.fromkeys(range(n) if wanted == SUM else [wanted - 1], 1))
        held = int(self.holds[slot])
        actual = terms(self.sums.counts(held))
        more = f" ({count} slots in all do not hold what is promised)" if count > 1 else ""
        noun = f"sums of chunk {chunk}" if wanted == SUM else f"chunk {chunk}"
        return Counterexample(
            "wrong", (rank,), (), chunk, expected, actual,
            f"at the end rank {rank} has as {noun} the contribution of {actual}, not of {expected}{more}",
        )  # fmt: skip

    def _order(self, left: int, right: int, chunk: int) -> Counterexample:
        return Counterexample(
            "order", (left, right), (), chunk, "the same sum, bit by bit, on all ranks", "different orders",
            f"ranks {left} and {right} have added the contributions to chunk {chunk} in different orders:"
            " their floating-point results differ",
        )  # fmt: skip

    def useless(self) -> Counterexample | None:
        """A message that changes no result: it brings what is there, or nobody reads what it brings."""
        units = self.units
        live = self.wanted != ANY
        matters = np.zeros(len(units.source), np.bool_)
        for time in range(self.last, -1, -1):
            now = self.reads[time]
            live[units.source[now[matters[now]]]] = True
            part = slice(self.writes[time], self.writes[time + 1])
            target = units.target[part]
            matters[part] = live[target]
            live[target[~units.reduce[part]]] = False
        for idle in (np.flatnonzero(self.same), np.flatnonzero(~matters)):
            if len(idle):
                return self._idle(int(idle[0]))
        return None

    def _idle(self, unit: int) -> Counterexample:
        rank, peer, time, chunk = self._ends(unit)
        why = "it holds that already" if self.same[unit] else "no result depends on it"
        return Counterexample(
            "useless", (rank, peer), (time,), chunk, "messages that change a result", why,
            f"rank {rank} receives chunk {chunk} from rank {peer} in its round {time}, but {why}",
        )  # fmt: skip
