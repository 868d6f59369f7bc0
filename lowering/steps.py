"""The rounds of a program as JAX runs them: messages that are only passed on, and rounds that are alike.

In a ring a rank sends in each round what arrived in the one before. Where that holds for all ranks the
message is passed on as it is, and where nobody reads it from its slot afterwards it is never written there:

    reduce_scatter by a ring  -->  n - 1 times: acc = permute(acc) + own part
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from commplan.collectives.layout import bounds
from commplan.collectives.program import Ints, Program, Round
from commplan.collectives.promise import promise
from commplan.collectives.transform import singles
from commplan.lowering.permutes import Move, Part, moves

UNROLLED = 32  # rounds of a form that are written out; more of them become a loop


class Step(NamedTuple):
    """A round. forwards: it sends what arrived in the one before. stores: what arrives goes into its slot."""

    moves: tuple[Move, ...]
    forwards: bool
    stores: bool

    @property
    def form(self) -> tuple[Any, ...]:
        return (self.forwards, self.stores, *(move.form for move in self.moves))


@functools.lru_cache(maxsize=64)
def steps(program: Program, size: int) -> tuple[Step, ...]:
    """The rounds of `program` on `size` elements in all. The last one stores nothing where its arrival is all
    that a rank is to have."""
    rounds = moves(program, size)
    forwards = [False, *(passed_on(*pair) for pair in itertools.pairwise(rounds))][: len(rounds)]
    result = bool(rounds) and lands_in_place(program, size, rounds[-1])
    stores = written(program, size, forwards, result)
    return tuple(Step(*each) for each in zip(rounds, forwards, stores, strict=True))


def stretches(rounds: Sequence[Step]) -> Iterator[Sequence[Step]]:
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


def lands_in_place(program: Program, size: int, last: Sequence[Move]) -> bool:
    """Whether what arrives last is all that a rank is to have: its block, whole."""
    part = _alone(last)
    if part is None or program.kind not in ("reduce_scatter", "scatter"):
        return False
    own = size // program.ranks
    wanted = np.arange(program.ranks) * own
    return part.length == own and part.is_whole and part.is_all and bool((part.start[1] == wanted).all())


def written(program: Program, size: int, forwards: Sequence[bool], result: bool) -> list[bool]:
    """Whether what arrives in each round is read from its slot later, or is a part of the result.

    forwards: which rounds pass on what arrived before; result: whether the last one's arrival is the result.
    Rounds are those that move anything at all of `size` elements.
    """
    edges = bounds(program.kind, program.ranks, program.chunks, size)
    live = promise(program.kind, program.ranks, program.chunks, program.root).ends.copy()
    live &= not result
    rounds = [each for each in program.rounds if _moves(each, edges)]
    needed: list[bool] = []
    for sends, forward in zip(reversed(rounds), reversed(forwards), strict=True):
        flat = [(*singles(send), send.reduce) for send in sends]
        needed.append(any(bool(live[dst, chunk].any()) for _, dst, chunk, _ in flat))
        for _, dst, chunk, reduce in flat:
            live[dst, chunk] = reduce  # a sum needs what was there
        for src, _, chunk, _ in flat:
            live[src, chunk] |= not forward
    return needed[::-1]


def _moves(sends: Round, edges: Ints) -> bool:
    return any(bool((edges[send.chunk] < edges[send.chunk + send.count]).any()) for send in sends)


def _alone(round_: Sequence[Move]) -> Part | None:
    """The only part of a round's only move; None where there are more."""
    return round_[0].parts[0] if len(round_) == 1 and len(round_[0].parts) == 1 else None
