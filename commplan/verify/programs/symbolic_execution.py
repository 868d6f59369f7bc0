"""Symbolic execution of chunk programs: the contents of each slot as a sum of the ranks' contributions.

A slot is empty, or holds the contribution of one rank or the sum of two such values. Sums are hash-consed:
equal numbers denote equal sums in equal order, up to swapping operands, so their floating-point results are
bitwise equal. A message is one transfer of equal chunks in one round at both ends. Hence slots of chunk c
only hold contributions to chunk c, and round t completes once all earlier rounds have, without deadlock.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, cast

import numpy as np

from commplan.collectives.postcondition import postcondition, sources
from commplan.collectives.program import Bools, ChunkProgram, Ints, Rotation, Send
from commplan.collectives.transform import expand_runs
from commplan.ir.collective_kinds import REDUCING, ROOTED
from commplan.verify.programs.counterexample import Counterexample, terms

_HALF = 32  # bits of the number of one operand in a key of `SumTable`
NOTHING = 0  # the contents of an empty slot; r + 1 is the contribution of rank r (see `SumTable`)
# The goal of a slot at the end is one of these, or r + 1 for the contribution of rank r.
ANY = -1  # any contents
SUM = 0  # the sum of all contributions


class TransferColumns(NamedTuple):
    """The transfers of a program in columns of equal lengths, one entry per transfer.

    Attributes:
        src: the sending rank.
        dst: the receiving rank.
        chunk: the first chunk.
        size: the number of consecutive chunks.
        reduce: whether the receiver adds the chunks to its slots instead of replacing them.
        round: the round, counted from 0.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    size: Ints
    reduce: Bools
    round: Ints

    @classmethod
    def from_program(cls, program: ChunkProgram) -> TransferColumns:
        """Return all transfers in program order."""
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
    def of_first_chunk(cls, program: ChunkProgram) -> TransferColumns:
        """The transfers of chunk 0 of a program that consists of rotations only.

        In a rotation, each rank sends a run of `length` chunks. Exactly one rank has chunk 0 at each position
        of its run, so a rotation contributes `length` transfers.
        """
        timed = [(time, send) for time, sends in enumerate(program.rounds) for send in sends]
        rotations = [send for _, send in timed if isinstance(send, Rotation)]
        assert len(rotations) == len(timed), "a family of transfers is no rotation"
        columns = [
            (rotation.step, rotation.first, rotation.reduce, time)
            for rotation, (time, _) in zip(rotations, timed, strict=True)
        ]
        length = np.array([rotation.length for rotation in rotations], np.int64)
        step, first, reduce, time = np.repeat(np.array(columns, np.int64).reshape(-1, 4), length, axis=0).T
        # The positions 0 to length - 1 within each rotation.
        position = np.arange(len(first)) - np.repeat(np.cumsum(length) - length, length)
        src = -(first + position) % program.ranks  # the rank whose chunk at this position is chunk 0
        dst = (src + step) % program.ranks
        return cls(src, dst, np.zeros_like(src), np.ones_like(src), reduce.astype(np.bool_), time)

    def take(self, order: Ints) -> TransferColumns:
        """The entries at the indices `order`."""
        return TransferColumns(*(column[order] for column in cast("tuple[Any, ...]", self)))


class ChunkMessages(NamedTuple):
    """Messages split into single chunks, sorted by `write`.

    Attributes:
        source: the sender's slot, rank * chunks + chunk.
        target: the receiver's slot, rank * chunks + chunk.
        reduce: whether the chunk is added to the slot instead of replacing it.
        read: time of the read, at least 0. It sees writes at or before this time.
        write: time of the write.
        sent_in: round of the sender.
        received_in: round of the receiver.
    """

    source: Ints
    target: Ints
    reduce: Bools
    read: Ints
    write: Ints
    sent_in: Ints
    received_in: Ints


class SumTable:
    """Numbers of symbolic values: 0 is empty, r + 1 is the contribution of rank r, others are sums.

    Attributes:
        ranks: number of ranks.
        terms: the ranks that contribute to each value, as a bit set, by number of the value.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.terms = [0, *(1 << rank for rank in range(ranks))]
        self._numbers: dict[int, int] = {}

    def add(self, lhs: Ints, rhs: Ints) -> Ints:
        """Add elementwise; -1 if both operands contain the contribution of the same rank."""
        keys = (np.minimum(lhs, rhs) << _HALF) | np.maximum(lhs, rhs)
        keys, places = np.unique(keys, return_inverse=True)
        sums = [self._number(key) for key in keys.tolist()]
        return np.array(sums, np.int64)[places]

    def _number(self, key: int) -> int:
        """The number of the sum of two values, whose numbers are the halves of `key`."""
        number_of_key = self._numbers.get(key)
        if number_of_key is not None:
            return number_of_key
        lhs, rhs = self.terms[key >> _HALF], self.terms[key & ((1 << _HALF) - 1)]
        number = -1 if lhs & rhs else len(self.terms)
        if number > 0:
            self.terms.append(lhs | rhs)
        self._numbers[key] = number
        return number

    def counts(self, *numbers: int) -> dict[int, int]:
        """Count how often each rank contributes to the values `numbers`."""
        bits = [self.terms[number] for number in numbers]
        every = (sum((term >> rank) & 1 for term in bits) for rank in range(self.ranks))
        return {rank: count for rank, count in enumerate(every) if count}


def representatives(program: ChunkProgram) -> tuple[TransferColumns, int]:
    """The transfers that represent all by symmetry, and the number of representative chunks.

    These chunks start at chunk 0. If `rotates(program)`, the transfers are those of chunk 0.
    """
    if rotates(program):
        return TransferColumns.of_first_chunk(program), 1
    transfers = TransferColumns.from_program(program)
    return transfers, orbit(program, transfers)


def interpret(program: ChunkProgram, transfers: TransferColumns, few: int) -> Counterexample | None:
    """Execute a program and return its first failure, if any.

    Args:
        program: the program.
        transfers: the representative transfers.
        few: number of representative chunks.
    """
    return follow(program, _units(program, transfers), few)


def follow(program: ChunkProgram, units: ChunkMessages, few: int) -> Counterexample | None:
    """Find the first failure in the representative chunks 0 to `few` - 1.

    Args:
        program: the program.
        units: its messages; those of other chunks are ignored.
        few: number of representative chunks.
    """
    if few < program.chunks:
        (source, chunk), (target, _) = (divmod(slot, program.chunks) for slot in (units.source, units.target))
        renumbered = units._replace(source=source * few + chunk, target=target * few + chunk)
        units = ChunkMessages(*(column[chunk < few] for column in cast("tuple[Any, ...]", renumbered)))
    race = _race(units, few)
    if race is not None:
        return race
    run = _Run(program, units, few)
    return run.forward() or run.result() or run.check_redundant()


def orbit(program: ChunkProgram, transfers: TransferColumns) -> int:
    """The number of chunks, starting at chunk 0, that represent all by symmetry.

    If each rank r performs the transfers of rank 0 with ranks shifted by r and chunks by r blocks, and the
    postcondition has the same symmetry, a proof of the first block covers all blocks. Rings have this
    property; most programs do not.
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
    """Whether `program` consists of rotations only, so that chunk 0 represents all chunks.

    A rotation gives rank r the transfer of rank 0 with ranks and chunks shifted by r. Each round, and thus
    the program, is therefore invariant under a shift of all ranks and chunks by one, as is the postcondition.
    A shift by c maps chunk 0 to chunk c. A program in which one rank differs cannot be written as rotations.
    """
    is_rotation = (
        isinstance(transfer, Rotation) and transfer.ranks == program.ranks
        for transfers in program.rounds
        for transfer in transfers
    )
    return program.chunks == program.ranks and _rotates_promise(program) and all(is_rotation)


def _rotates_promise(program: ChunkProgram) -> bool:
    """Whether the postcondition is invariant under a shift of ranks and blocks by one.

    The postcondition of a swap is not, since its slots are counted by distance.
    """
    unlike = program.kind in ROOTED or program.kind == "swap"
    return not unlike and program.ranks > 1 and program.chunks % program.ranks == 0


def _units(program: ChunkProgram, transfers: TransferColumns) -> ChunkMessages:
    """The messages of `transfers`: round t is read at time t and written at time t + 1."""
    transfers = transfers.take(np.lexsort((transfers.dst, transfers.src, transfers.round)))
    k, sizes = program.chunks, transfers.size
    src, dst, chunk = expand_runs(Send(*transfers[:4], reduce=False))
    reduce, time = np.repeat(transfers.reduce, sizes), np.repeat(transfers.round, sizes)
    return ChunkMessages(src * k + chunk, dst * k + chunk, reduce, time, time + 1, time, time)


def _race(units: ChunkMessages, chunks: int) -> Counterexample | None:
    """Find two messages that one rank receives in one slot in one round.

    Args:
        units: the messages.
        chunks: number of chunks of each rank.
    """
    width = int(units.received_in.max(initial=0)) + 1
    keys = units.target * width + units.received_in
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if not len(same):
        return None
    first = min(same.tolist(), key=lambda place: int(units.write[order[place]]))
    first_unit = int(order[first])
    second_unit = int(order[first + 1])
    rank, chunk = divmod(int(units.target[first_unit]), chunks)
    peers = [int(units.source[unit]) // chunks for unit in (first_unit, second_unit)]
    actions = ["reduce" if units.reduce[unit] else "copy" for unit in (first_unit, second_unit)]
    time = int(units.received_in[first_unit])
    return Counterexample(
        "race", (rank, *peers), (time,), chunk, "one message into a slot in a round",
        f"{actions[0]} from rank {peers[0]}, {actions[1]} from rank {peers[1]}",
        f"rank {rank} receives chunk {chunk} twice in its round {time}: the result depends on which"
        " comes first",
    )  # fmt: skip


class _Run:
    """A symbolic execution: forward for contents of slots, backward for messages that affect results.

    Attributes:
        program: the program.
        units: the messages of the representative chunks.
        chunks: number of representative chunks.
        alike: number of chunks that each of them represents.
        sums: the numbers of symbolic values.
        holds: the number of the contents of each slot (rank * chunks + chunk).
        goal: the required final contents of each slot, as `ANY` and `SUM` describe.
        last: time of the last write.
        redundant: whether each message delivers data that is already present.
        reads: the messages that are read at each time.
        writes: the index of the first message that is written at each time.
    """

    def __init__(self, program: ChunkProgram, units: ChunkMessages, few: int) -> None:
        self.program, self.units, self.chunks, self.alike = program, units, few, program.chunks // few
        self.sums = SumTable(program.ranks)
        starts, ends = postcondition(program.kind, program.ranks, program.chunks, program.root, few=few)
        rank = np.arange(1, program.ranks + 1, dtype=np.int64)[:, None]
        source = SUM if program.kind in REDUCING else sources(program, few) + 1
        self.holds = np.where(starts, rank, NOTHING).ravel()
        self.goal = np.where(ends, source, ANY).ravel()
        self.last = int(units.write.max(initial=0))
        self.redundant = np.zeros(len(units.source), np.bool_)
        by_read = np.argsort(units.read, kind="stable")
        edges = np.arange(self.last + 2)
        starts = np.searchsorted(units.read[by_read], edges).tolist()
        self.reads = [by_read[start:stop] for start, stop in itertools.pairwise(starts)]
        self.writes: list[int] = np.searchsorted(units.write, edges).tolist()

    def forward(self) -> Counterexample | None:
        """Execute; stops at the first contribution that is missing or added twice."""
        units, holds = self.units, self.holds
        carried = np.zeros(len(units.source), np.int64)  # contents of messages
        for time in range(self.last + 1):
            start, stop = self.writes[time], self.writes[time + 1]
            if start < stop:
                wrong = self._write(slice(start, stop), carried)
                if wrong is not None:
                    return wrong
            reads = self.reads[time]
            carried[reads] = holds[units.source[reads]]
            empty = reads[carried[reads] == NOTHING]
            if len(empty):
                return self._unset(int(empty[0]), sends=True)
        return None

    def _write(self, span: slice, carried: Ints) -> Counterexample | None:
        """Write the messages with indices `span`. Returns a counterexample for a failed addition.

        An addition fails if the slot is empty, or if a contribution is added twice.
        """
        target, reduce, coming = self.units.target[span], self.units.reduce[span], carried[span]
        current = self.holds[target]
        self.redundant[span] = ~reduce & (current == coming)
        if not reduce.any():
            self.holds[target] = coming
            return None
        empty = np.flatnonzero(reduce & (current == NOTHING))
        if len(empty):
            return self._unset(span.start + int(empty[0]), sends=False)
        added = self.sums.add(current[reduce], coming[reduce])
        double = np.flatnonzero(added < 0)
        if len(double):
            place = int(np.flatnonzero(reduce)[double[0]])
            return self._double(span.start + place, int(current[place]), int(coming[place]))
        new = coming.copy()
        new[reduce] = added
        self.holds[target] = new
        return None

    def _place(self, slot: int) -> tuple[int, int]:
        """The rank and the chunk of a slot."""
        return divmod(slot, self.chunks)

    def _ends(self, unit: int, *, sends: bool = False) -> tuple[int, int, int, int]:
        """Return the endpoint (receiver, or sender if `sends`), its peer, its round, and the chunk."""
        ends = self._place(int(self.units.target[unit])), self._place(int(self.units.source[unit]))
        (rank, chunk), (peer, _) = reversed(ends) if sends else ends
        time = int(self.units.sent_in[unit] if sends else self.units.received_in[unit])
        return rank, peer, time, chunk

    def _unset(self, unit: int, *, sends: bool) -> Counterexample:
        """Message `unit` is read from (`sends`), or added to, an empty slot."""
        rank, peer, time, chunk = self._ends(unit, sends=sends)
        action = f"sends chunk {chunk} to rank {peer}" if sends else f"adds to chunk {chunk} from rank {peer}"
        return Counterexample(
            "unset", (rank, peer), (time,), chunk, "a value in the slot", "nothing",
            f"rank {rank} {action} in its round {time}, but the slot is empty",
        )  # fmt: skip

    def _double(self, unit: int, current: int, coming: int) -> Counterexample:
        """Message `unit` adds `coming` to `current`, which have a contribution in common."""
        rank, peer, time, chunk = self._ends(unit)
        counts = self.sums.counts(current, coming)
        repeated = terms({source: count for source, count in counts.items() if count > 1})
        return Counterexample(
            "double", (rank, peer), (time,), chunk, "every contribution once", terms(counts),
            f"rank {rank} adds chunk {chunk} from rank {peer} in its round {time}, and then holds {repeated}",
        )  # fmt: skip

    def result(self) -> Counterexample | None:
        """Compare the final contents of slots with the postcondition.

        Sums must have all contributions, added in the same order on all ranks that hold the chunk.
        """
        n, k = self.program.ranks, self.chunks
        everything = (1 << n) - 1
        full = np.array([bits == everything for bits in self.sums.terms], np.bool_)
        fine = np.where(self.goal == SUM, full[self.holds], self.holds == self.goal)
        wrong = np.flatnonzero(~fine & (self.goal != ANY))
        if len(wrong):
            return self._wrong(int(wrong[0]), len(wrong) * self.alike)
        holds = self.holds.reshape(n, k)
        sums = (self.goal == SUM).reshape(n, k)
        firsts = sums.argmax(axis=0)
        unlike = sums & (holds != holds[firsts, np.arange(k)])
        for rank, chunk in np.argwhere(unlike)[:1].tolist():
            return self._order(int(firsts[chunk]), rank, chunk)
        return None

    def _wrong(self, slot: int, count: int) -> Counterexample:
        """The contents of `slot` violate the postcondition, as those of `count` slots in all."""
        rank, chunk = self._place(slot)
        goal, n = int(self.goal[slot]), self.program.ranks
        expected = terms(dict.fromkeys(range(n) if goal == SUM else [goal - 1], 1))
        current = int(self.holds[slot])
        actual = terms(self.sums.counts(current))
        more = f" ({count} slots in all do not hold the promised value)" if count > 1 else ""
        noun = f"sums of chunk {chunk}" if goal == SUM else f"chunk {chunk}"
        return Counterexample(
            "wrong", (rank,), (), chunk, expected, actual,
            f"at the end rank {rank} has as {noun} the contribution of {actual}, not of {expected}{more}",
        )  # fmt: skip

    def _order(self, first: int, second: int, chunk: int) -> Counterexample:
        return Counterexample(
            "order", (first, second), (), chunk, "the same sum, bit by bit, on all ranks", "different orders",
            f"ranks {first} and {second} have added the contributions to chunk {chunk} in different orders:"
            " their floating-point results differ",
        )  # fmt: skip

    def check_redundant(self) -> Counterexample | None:
        """Find a message that delivers data already present, or data that is never read."""
        units = self.units
        live = self.goal != ANY
        matters = np.zeros(len(units.source), np.bool_)
        for time in range(self.last, -1, -1):
            reads = self.reads[time]
            live[units.source[reads[matters[reads]]]] = True
            part = slice(self.writes[time], self.writes[time + 1])
            target = units.target[part]
            matters[part] = live[target]
            live[target[~units.reduce[part]]] = False
        for idle in (np.flatnonzero(self.redundant), np.flatnonzero(~matters)):
            if len(idle):
                return self._idle(int(idle[0]))
        return None

    def _idle(self, unit: int) -> Counterexample:
        rank, peer, time, chunk = self._ends(unit)
        why = "it holds that already" if self.redundant[unit] else "no result depends on it"
        return Counterexample(
            "redundant", (rank, peer), (time,), chunk, "messages that change a result", why,
            f"rank {rank} receives chunk {chunk} from rank {peer} in its round {time}, but {why}",
        )  # fmt: skip
