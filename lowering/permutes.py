"""Translates the rounds of a chunk program to permutes: transfers between ranks, in windows of equal length.

`lowering.jax` passes these to `lax.ppermute`, and an audit expects them in a compiled step.

In each round of a ring, a rank sends the data that it received in the previous round. If this holds for all
ranks, the received array is sent on without being read from the buffer. If no rank reads it from the buffer
later, it is also never written there:

    reduce_scatter by a ring over n ranks  -->  n - 1 times: acc = permute(acc) + own part
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from commplan.collectives.layout import bounds
from commplan.collectives.postcondition import postcondition
from commplan.collectives.program import Bools, ChunkProgram, Ints, Round
from commplan.collectives.transform import expand_runs
from commplan.ir.collective_kinds import SCATTERING

UNROLLED = 32  # maximum number of consecutive rounds of one form that are unrolled; more become a loop


class WindowTransfer(NamedTuple):
    """A transfer of consecutive elements of the buffer from one rank to another.

    Attributes:
        src: The rank that sends.
        dst: The rank that receives.
        low, high: The elements `low` to `high - 1` of the whole buffer are sent.
        adds: Whether `dst` adds them to its own elements; otherwise it overwrites those.
    """

    src: int
    dst: int
    low: int
    high: int
    adds: bool

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.high - self.low


@dataclass(frozen=True)
class PermutePart:
    """A window of `length` elements that each rank sends, and one that each receives.

    Attributes:
        length: The number of elements.
        start: The offset of each rank's window in the whole buffer, in elements; int64[2, ranks]. Row 0 is
            for sending and row 1 for receiving. 0 for ranks that do not send or receive.
        low, high: The received elements `low` to `high - 1` of the window are stored, the others are not;
            int64[ranks]. Both are 0 if the rank receives nothing.
        adds: Whether the receiver adds the elements to its own; otherwise it overwrites those; bool[ranks].
    """

    length: int
    start: Ints
    low: Ints
    high: Ints
    adds: Bools

    @property
    def form(self) -> tuple[Any, ...]:
        """The static properties. Parts of equal form differ only in the contents of their tables."""
        return (self.length, self.is_whole, self.is_all, self.adds.all(), self.adds.any())

    @property
    def is_whole(self) -> bool:
        """Whether every receiver stores the whole window."""
        return bool(np.all((self.high - self.low == self.length) | (self.high == self.low)))

    @property
    def is_all(self) -> bool:
        """Whether every rank receives."""
        return bool((self.high > self.low).all())

    @property
    def tables(self) -> tuple[Ints | Bools, ...]:
        """The offset for sending, that for receiving, `low`, `high` and `adds`; each of shape [ranks]."""
        return (*self.start, self.low, self.high, self.adds)


class Permute(NamedTuple):
    """One ppermute.

    Attributes:
        pairs: Its (source, destination) pairs, sorted. A rank is at most one source and one destination.
        parts: The windows whose concatenation each rank sends.
    """

    pairs: tuple[tuple[int, int], ...]
    parts: tuple[PermutePart, ...]

    @property
    def form(self) -> tuple[Any, ...]:
        """The static properties. Permutes of equal form differ only in the contents of their tables."""
        return (self.pairs, *(part.form for part in self.parts))


@lru_cache(maxsize=64)
def permutes_of_rounds(program: ChunkProgram, size: int) -> tuple[tuple[Permute, ...], ...]:
    """The ppermutes of each round of `program` that transfers any element.

    Args:
        program: The program.
        size: The number of elements of the whole buffer.
    """
    edges = bounds(program.kind, program.ranks, program.chunks, size)
    rounds = (tuple(_permutes_of_round(sends, edges, program.ranks)) for sends in program.rounds)
    return tuple(permutes for permutes in rounds if permutes)


def _permutes_of_round(sends: Round, edges: Ints, ranks: int) -> Iterator[Permute]:
    """The ppermutes of one round, one for each group of messages; part `i` has the i-th transfer of each."""
    for group in message_groups(sends, edges):
        longest = max(len(message) for message in group.values())
        columns = [[message[i] for message in group.values() if i < len(message)] for i in range(longest)]
        yield Permute(tuple(sorted(group)), tuple(_part(column, int(edges[-1]), ranks) for column in columns))


def message_groups(sends: Round, edges: Ints) -> list[dict[tuple[int, int], list[WindowTransfer]]]:
    """The messages of a round, in groups in which every rank sends and receives at most once.

    All transfers from one rank to another in a round are one message. Each message joins the first group
    without its source and destination, longer messages first, so messages of similar length share a group.
    No element is written twice in a round, which is proved, so the order of messages does not matter.

    Args:
        sends: The transfers of the round. Those without elements are dropped.
        edges: The offset of each chunk in elements, and the number of elements; [chunks + 1].

    Returns:
        For each group, the transfers of each message by (source, destination), the longest transfer first.
    """
    messages: dict[tuple[int, int], list[WindowTransfer]] = {}
    for send in sends:
        for src, dst, chunk, count in zip(send.src, send.dst, send.chunk, send.count, strict=True):
            transfer = WindowTransfer(
                int(src), int(dst), int(edges[chunk]), int(edges[chunk + count]), send.reduce
            )
            if transfer.length:
                messages.setdefault((transfer.src, transfer.dst), []).append(transfer)
    for message in messages.values():
        message.sort(key=lambda transfer: -transfer.length)
    groups: list[dict[tuple[int, int], list[WindowTransfer]]] = []
    for pair in sorted(messages, key=lambda pair: -sum(transfer.length for transfer in messages[pair])):
        for group in groups:
            if all(pair[0] != src and pair[1] != dst for src, dst in group):
                group[pair] = messages[pair]
                break
        else:
            groups.append({pair: messages[pair]})
    return groups


def _part(column: Sequence[WindowTransfer], size: int, ranks: int) -> PermutePart:
    """The part for transfers between distinct ranks, as long as the longest of them."""
    length = max(transfer.length for transfer in column)
    start = np.zeros((2, ranks), np.int64)
    low, high = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    # The value does not matter for ranks that receive nothing.
    adds = np.full(ranks, all(transfer.adds for transfer in column))
    for transfer in column:
        first = min(transfer.low, size - length)  # a window must not exceed the end of the buffer
        start[0, transfer.src] = start[1, transfer.dst] = first
        low[transfer.dst] = transfer.low - first
        high[transfer.dst] = transfer.high - first
        adds[transfer.dst] = transfer.adds
    return PermutePart(length, start, low, high, adds)


class PermuteRound(NamedTuple):
    """A round of a program, as ppermutes.

    Attributes:
        permutes: The ppermutes; at least one.
        forwards: Whether it sends the array that was received in the round before; see `is_forwarded`.
        stores: Whether received data is written to the buffer. If not, only the next round or the result
            uses it.
    """

    permutes: tuple[Permute, ...]
    forwards: bool
    stores: bool

    @property
    def form(self) -> tuple[Any, ...]:
        """The static properties. Rounds of equal form can be iterations of one loop."""
        return (self.forwards, self.stores, *(permute.form for permute in self.permutes))


@lru_cache(maxsize=64)
def permute_rounds(program: ChunkProgram, size: int) -> tuple[PermuteRound, ...]:
    """The rounds of `program` that transfer any element.

    If the data received in the last round is the result (`is_result`), it is not stored.

    Args:
        program: The program.
        size: The number of elements of the whole buffer.
    """
    rounds = permutes_of_rounds(program, size)
    forwards = [False, *(is_forwarded(*pair) for pair in itertools.pairwise(rounds))][: len(rounds)]
    ends_in_result = bool(rounds) and is_result(program, size, rounds[-1])
    stores = stored_rounds(program, size, forwards, ends_in_result)
    return tuple(PermuteRound(*fields) for fields in zip(rounds, forwards, stores, strict=True))


def stretches(rounds: Sequence[PermuteRound]) -> Iterator[Sequence[PermuteRound]]:
    """Split rounds into single rounds and sequences of more than `UNROLLED` rounds of one form."""
    for _, group in itertools.groupby(rounds, key=lambda permute_round: permute_round.form):
        sequence = list(group)
        if len(sequence) > UNROLLED:
            yield sequence
        else:
            yield from ([permute_round] for permute_round in sequence)


def is_forwarded(before: Sequence[Permute], after: Sequence[Permute]) -> bool:
    """Whether all data sent in the round `after` was received in the round `before`, at the same place.

    False if a round has more than one ppermute or part.
    """
    first, second = _single_part(before), _single_part(after)
    if first is None or second is None or first.length != second.length:
        return False
    receivers = {dst for _, dst in before[0].pairs}
    return all(
        src in receivers
        and first.start[1, src] == second.start[0, src]
        and first.low[src] <= second.low[dst]
        and second.high[dst] <= first.high[src]
        for src, dst in after[0].pairs
    )


def is_result(program: ChunkProgram, size: int, last: Sequence[Permute]) -> bool:
    """Whether the data received in the round `last` is the complete result of every rank: its block.

    False for collectives that do not scatter, and if the round has more than one ppermute or part.
    """
    part = _single_part(last)
    if part is None or program.kind not in SCATTERING:
        return False
    block = size // program.ranks
    expected = np.arange(program.ranks) * block
    return part.length == block and part.is_whole and part.is_all and bool((part.start[1] == expected).all())


def stored_rounds(
    program: ChunkProgram, size: int, forwards: Sequence[bool], ends_in_result: bool
) -> list[bool]:
    """For each round, whether its received data is read from the buffer later, or is part of the result.

    Args:
        program: The program.
        size: The number of elements of the whole buffer.
        forwards: For each round, whether it forwards the data of the round before.
        ends_in_result: Whether the data received last is the result, which is then not read from the buffer.

    Returns:
        One boolean for each round that transfers any element, as many as `forwards`.
    """
    edges = bounds(program.kind, program.ranks, program.chunks, size)
    # Going backwards, live[rank, chunk] says whether a later round or the result reads the chunk.
    live = postcondition(program.kind, program.ranks, program.chunks, program.root).ends.copy()
    live &= not ends_in_result
    rounds = [sends for sends in program.rounds if _has_data(sends, edges)]
    needed: list[bool] = []
    for sends, forward in zip(reversed(rounds), reversed(forwards), strict=True):
        expanded = [(*expand_runs(send), send.reduce) for send in sends]
        needed.append(any(bool(live[dst, chunk].any()) for _, dst, chunk, _ in expanded))
        for _, dst, chunk, reduce in expanded:
            live[dst, chunk] = reduce  # a reduction reads the old value
        for src, _, chunk, _ in expanded:
            live[src, chunk] |= not forward
    return needed[::-1]


def _has_data(sends: Round, edges: Ints) -> bool:
    return any(bool((edges[send.chunk] < edges[send.chunk + send.count]).any()) for send in sends)


def _single_part(round_: Sequence[Permute]) -> PermutePart | None:
    """The only part of the only ppermute of a round; None if there are more."""
    return round_[0].parts[0] if len(round_) == 1 and len(round_[0].parts) == 1 else None
