"""The rounds of a chunk program as permutes: what moves between which ranks, in windows of equal length.

This is what `lowering.jax` hands to `lax.ppermute`, and what an audit expects to find in a compiled step.

In a ring a rank sends in each round what arrived in the one before. Where that holds for all ranks the
message is passed on as it is, and where nobody reads it from its slot afterwards it is never written there:

    reduce_scatter by a ring  -->  n - 1 times: acc = permute(acc) + own part
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

UNROLLED = 32  # rounds of a form that are written out; more of them become a loop


class WindowTransfer(NamedTuple):
    """Elements `low` to `high - 1` of `src` go to `dst`, which adds them to what it has or takes them."""

    src: int
    dst: int
    low: int
    high: int
    adds: bool

    @property
    def length(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class PermutePart:
    """A window of `length` elements that each rank sends, and one that each receives.

    start: where they lie, as sender [0] and as receiver [1]. low, high: which elements of a receiver's window
    are its own. adds: whether it adds them to what it has. All [ranks]; a rank that receives nothing has
    low = high.
    """

    length: int
    start: Ints
    low: Ints
    high: Ints
    adds: Bools

    @property
    def form(self) -> tuple[Any, ...]:
        """What is written into the program: parts of one form differ in their tables alone."""
        return (self.length, self.is_whole, self.is_all, self.adds.all(), self.adds.any())

    @property
    def is_whole(self) -> bool:
        """Whether every rank that receives takes all of the window."""
        return bool(np.all((self.high - self.low == self.length) | (self.high == self.low)))

    @property
    def is_all(self) -> bool:
        """Whether all ranks receive."""
        return bool((self.high > self.low).all())

    @property
    def tables(self) -> tuple[Ints | Bools, ...]:
        return (*self.start, self.low, self.high, self.adds)


class Move(NamedTuple):
    """One ppermute: from sources to destinations, each rank once at most; its parts one after the other."""

    pairs: tuple[tuple[int, int], ...]
    parts: tuple[PermutePart, ...]

    @property
    def form(self) -> tuple[Any, ...]:
        return (self.pairs, *(part.form for part in self.parts))


@lru_cache(maxsize=64)
def moves(program: ChunkProgram, size: int) -> tuple[tuple[Move, ...], ...]:
    """The ppermutes of each round of `program` on `size` elements in all."""
    edges = bounds(program.kind, program.ranks, program.chunks, size)
    rounds = (tuple(_moves_of(each, edges, program.ranks)) for each in program.rounds)
    return tuple(each for each in rounds if each)


def _moves_of(sends: Round, edges: Ints, ranks: int) -> Iterator[Move]:
    """As few ppermutes as it takes for each rank to send and to receive once."""
    for group in message_groups(sends, edges):
        longest = max(len(message) for message in group.values())
        columns = [[own[i] for own in group.values() if i < len(own)] for i in range(longest)]
        yield Move(tuple(sorted(group)), tuple(_part(column, int(edges[-1]), ranks) for column in columns))


def message_groups(sends: Round, edges: Ints) -> list[dict[tuple[int, int], list[WindowTransfer]]]:
    """The messages of a round, (source, destination) -> what it carries, longest first, in groups in which
    every rank sends once at most and receives once at most; long messages beside long ones.

    edges: offsets of the chunks in elements; what is empty is left out. What one rank sends to another in a
    round is one message. No slot is written twice in a round: that is proved, and so the order of the
    messages of a round does not matter.
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
        message.sort(key=lambda each: -each.length)
    groups: list[dict[tuple[int, int], list[WindowTransfer]]] = []
    for pair in sorted(messages, key=lambda pair: -sum(each.length for each in messages[pair])):
        for group in groups:
            if all(pair[0] != src and pair[1] != dst for src, dst in group):
                group[pair] = messages[pair]
                break
        else:
            groups.append({pair: messages[pair]})
    return groups


def _part(column: Sequence[WindowTransfer], size: int, ranks: int) -> PermutePart:
    length = max(each.length for each in column)
    start = np.zeros((2, ranks), np.int64)
    low, high = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    # Adding or not is all the same to those that receive nothing.
    adds = np.full(ranks, all(each.adds for each in column))
    for each in column:
        first = min(each.low, size - length)  # a window at the end is moved back, to lie inside
        start[0, each.src] = start[1, each.dst] = first
        low[each.dst], high[each.dst], adds[each.dst] = each.low - first, each.high - first, each.adds
    return PermutePart(length, start, low, high, adds)


class PermuteStep(NamedTuple):
    """A round. forwards: it sends what arrived in the one before. stores: what arrives goes into its slot."""

    moves: tuple[Move, ...]
    forwards: bool
    stores: bool

    @property
    def form(self) -> tuple[Any, ...]:
        return (self.forwards, self.stores, *(move.form for move in self.moves))


@lru_cache(maxsize=64)
def steps(program: ChunkProgram, size: int) -> tuple[PermuteStep, ...]:
    """The rounds of `program` on `size` elements in all. The last one stores nothing where its arrival is all
    that a rank is to have."""
    rounds = moves(program, size)
    forwards = [False, *(passed_on(*pair) for pair in itertools.pairwise(rounds))][: len(rounds)]
    result = bool(rounds) and lands_in_place(program, size, rounds[-1])
    stores = written(program, size, forwards, result)
    return tuple(PermuteStep(*each) for each in zip(rounds, forwards, stores, strict=True))


def stretches(rounds: Sequence[PermuteStep]) -> Iterator[Sequence[PermuteStep]]:
    """The rounds one by one, but for more than `UNROLLED` of one form after each other: those together."""
    for _, alike in itertools.groupby(rounds, key=lambda each: each.form):
        together_ = list(alike)
        if len(together_) > UNROLLED:
            yield together_
        else:
            yield from ([each] for each in together_)


def passed_on(before: Sequence[Move], now: Sequence[Move]) -> bool:
    """Whether all that is sent `now` is what arrived in the round before, at the same place."""
    first, second = _alone(before), _alone(now)
    if first is None or second is None or first.length != second.length:
        return False
    arrived = {dst for _, dst in before[0].pairs}
    return all(
        src in arrived
        and first.start[1, src] == second.start[0, src]
        and first.low[src] <= second.low[dst]
        and second.high[dst] <= first.high[src]
        for src, dst in now[0].pairs
    )


def lands_in_place(program: ChunkProgram, size: int, last: Sequence[Move]) -> bool:
    """Whether what arrives last is all that a rank is to have: its block, whole."""
    part = _alone(last)
    if part is None or program.kind not in ("reduce_scatter", "scatter"):
        return False
    own = size // program.ranks
    wanted = np.arange(program.ranks) * own
    return part.length == own and part.is_whole and part.is_all and bool((part.start[1] == wanted).all())


def written(program: ChunkProgram, size: int, forwards: Sequence[bool], result: bool) -> list[bool]:
    """Whether what arrives in each round is read from its slot later, or is a part of the result.

    forwards: which rounds pass on what arrived before; result: whether the last one's arrival is the result.
    Rounds are those that move anything at all of `size` elements.
    """
    edges = bounds(program.kind, program.ranks, program.chunks, size)
    live = postcondition(program.kind, program.ranks, program.chunks, program.root).ends.copy()
    live &= not result
    rounds = [each for each in program.rounds if _moves(each, edges)]
    needed: list[bool] = []
    for sends, forward in zip(reversed(rounds), reversed(forwards), strict=True):
        flat = [(*expand_runs(send), send.reduce) for send in sends]
        needed.append(any(bool(live[dst, chunk].any()) for _, dst, chunk, _ in flat))
        for _, dst, chunk, reduce in flat:
            live[dst, chunk] = reduce  # a sum needs what was there
        for src, _, chunk, _ in flat:
            live[src, chunk] |= not forward
    return needed[::-1]


def _moves(sends: Round, edges: Ints) -> bool:
    return any(bool((edges[send.chunk] < edges[send.chunk + send.count]).any()) for send in sends)


def _alone(round_: Sequence[Move]) -> PermutePart | None:
    """The only part of a round's only move; None where there are more."""
    return round_[0].parts[0] if len(round_) == 1 and len(round_[0].parts) == 1 else None
