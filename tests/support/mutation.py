"""Programs broken on purpose: one mistake in the ranks' code, as by a compiler or by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import KINDS, ChunkProgram, Kind, Send
from commplan.collectives.registry import algorithms, hierarchical, program
from commplan.diagnostics import CommplanError
from commplan.ir.collective_kinds import ROOTED

from .projection import Posts, Projection, project


@dataclasses.dataclass
class End:
    """One end of a message."""

    rank: int
    round: int
    peer: int
    chunk: int
    size: int
    reduce: bool


class Draft:
    """A mutable program: message i is `sends[i]` and `receives[i]`, None if an end is removed."""

    def __init__(self, of: ChunkProgram) -> None:
        self.program = of
        self.sends: list[End | None] = []
        self.receives: list[End | None] = []
        for time, families in enumerate(of.rounds):
            for family in families:
                columns = (family.src, family.dst, family.chunk, family.count)
                for src, dst, chunk, size in zip(*(column.tolist() for column in columns), strict=True):
                    self.sends.append(End(src, time, dst, chunk, size, False))
                    self.receives.append(End(dst, time, src, chunk, size, family.reduce))

    def projection(self) -> Projection:
        of = self.program
        sends, receives = (_posts([end for end in ends if end]) for ends in (self.sends, self.receives))
        return Projection(of.name, of.kind, of.ranks, of.chunks, sends, receives, of.root, of.targets)

    def changed(self) -> ChunkProgram | None:
        """The current program; None if the two ends of a message differ, which a program cannot express."""
        rounds: dict[int, list[Send]] = {}
        for send, receive in zip(self.sends, self.receives, strict=True):
            if send is None and receive is None:
                continue
            if send is None or receive is None or (send.rank, send.peer) != (receive.peer, receive.rank):
                return None
            if (send.round, send.chunk, send.size) != (receive.round, receive.chunk, receive.size):
                return None
            columns = (np.array([x]) for x in (send.rank, receive.rank, send.chunk, send.size))
            rounds.setdefault(send.round, []).append(Send(*columns, receive.reduce))
        every = (tuple(rounds.get(time, ())) for time in range(max(rounds, default=-1) + 1))
        return dataclasses.replace(self.program, rounds=tuple(every))


def _posts(ends: list[End]) -> Posts:
    rank, time, peer, chunk, size = (
        np.array([getattr(end, name) for end in ends], np.int64)
        for name in ("rank", "round", "peer", "chunk", "size")
    )
    reduce = np.array([end.reduce for end in ends], np.bool_)
    return Posts(rank, time, peer, chunk, size, reduce).ordered()


class Mutant(NamedTuple):
    """A broken program and its change; `program` is None if the result is not a valid program."""

    kind: str
    what: str
    projection: Projection
    program: ChunkProgram | None


def _other(rng: random.Random, below: int, *than: int) -> int | None:
    """Some number below `below` that is none of `than`."""
    candidates = [number for number in range(below) if number not in than]
    return rng.choice(candidates) if candidates else None


def _sides(rng: random.Random, draft: Draft, index: int) -> list[End]:
    """Both ends of a message, or one of them: the mistake is made by two ranks alike, or by one."""
    send, receive = draft.sends[index], draft.receives[index]
    assert send is not None and receive is not None
    return rng.choice([[send, receive], [send], [receive]])


def dropped(rng: random.Random, draft: Draft, index: int) -> str | None:
    ends = _sides(rng, draft, index)
    for kind in (draft.sends, draft.receives):
        if kind[index] in ends:
            kind[index] = None
    return f"{_side(ends)} dropped"


def _side(ends: list[End]) -> str:
    return "both ends" if len(ends) == 2 else "one end"


def doubled(rng: random.Random, draft: Draft, index: int) -> str | None:
    ends = _sides(rng, draft, index)
    later = rng.choice([0, 0, 1, len(draft.program.rounds)])
    for kind in (draft.sends, draft.receives):
        end = kind[index]
        assert end is not None
        again = (
            dataclasses.replace(end, round=end.round + later) if any(end is sent for sent in ends) else None
        )
        kind.insert(index + 1, again)
    return f"{_side(ends)} doubled {later} rounds later"


def misdirected(rng: random.Random, draft: Draft, index: int) -> str | None:
    send, receive = draft.sends[index], draft.receives[index]
    assert send is not None and receive is not None
    wrong = _other(rng, draft.program.ranks, send.rank, receive.rank)
    if wrong is None:
        return None
    side = rng.choice(["send", "receive", "to", "from"])
    if side in ("send", "to"):
        send.peer = wrong
    if side in ("receive", "from"):
        receive.peer = wrong
    if side == "to":
        receive.rank = wrong
    if side == "from":
        send.rank = wrong
    return f"{side} misdirected to {wrong}"


def reordered(rng: random.Random, draft: Draft, index: int) -> str | None:
    ends = _sides(rng, draft, index)
    time = _other(rng, len(draft.program.rounds) + 1, ends[0].round)
    if time is None:
        return None
    for end in ends:
        end.round = time
    return f"{_side(ends)} moved to round {time}"


def wrong_chunk(rng: random.Random, draft: Draft, index: int) -> str | None:
    ends = _sides(rng, draft, index)
    chunk = _other(rng, draft.program.chunks - ends[0].size + 1, ends[0].chunk)
    if chunk is None:
        return None
    for end in ends:
        end.chunk = chunk
    return f"{_side(ends)} for chunk {chunk}"


def wrong_operation(rng: random.Random, draft: Draft, index: int) -> str | None:
    end = draft.receives[index]
    assert end is not None
    end.reduce = not end.reduce
    return "reduce for copy" if end.reduce else "copy for reduce"


def swapped(rng: random.Random, draft: Draft, index: int) -> str | None:
    """Two rounds of one rank change places."""
    end = draft.sends[index]
    assert end is not None
    mine = [
        transfer
        for transfer in (*draft.sends, *draft.receives)
        if transfer is not None and transfer.rank == end.rank
    ]
    rounds = sorted({transfer.round for transfer in mine} - {end.round})
    if not rounds:
        return None
    first, other = end.round, rng.choice(rounds)
    for each in mine:
        if each.round in (first, other):
            each.round = first + other - each.round
    return f"rounds {first} and {other} of rank {end.rank} swapped"


MUTATIONS: dict[str, Callable[[random.Random, Draft, int], str | None]] = {
    "dropped": dropped,
    "doubled": doubled,
    "misdirected": misdirected,
    "reordered": reordered,
    "wrong chunk": wrong_chunk,
    "wrong operation": wrong_operation,
    "swapped": swapped,
}


def some_program(rng: random.Random, most: int) -> ChunkProgram:
    """One of all that the registry has, hierarchies included, with at least one message."""
    while True:
        kind: Kind = rng.choice(KINDS)
        slices = rng.choice([1, 1, 1, 2, 3])
        try:
            program = (_hierarchy if rng.random() < 0.2 else _flat)(rng, kind, most, slices)
        except CommplanError:  # the levels drawn make no hierarchy of this kind
            continue
        if any(len(family.src) for families in program.rounds for family in families):
            return program


def _flat(rng: random.Random, kind: Kind, most: int, slices: int) -> ChunkProgram:
    n = rng.randint(2, most if rng.random() < 0.25 else min(most, 13))
    name = rng.choice(algorithms(kind))
    return program(name, kind, n, root=rng.randrange(n) if kind in ROOTED else 0, slices=slices)


def _hierarchy(rng: random.Random, kind: Kind, most: int, slices: int) -> ChunkProgram:
    sizes = rng.choice([(2, 2), (3, 2), (2, 4), (4, 3), (2, 2, 2), (2, 3, 2)])
    levels = [(rng.choice(algorithms()), size) for size in sizes]
    root = rng.randrange(min(most, math.prod(sizes))) if kind in ROOTED else 0
    return hierarchical(levels, kind, root=root, slices=slices)


def mutate(rng: random.Random, of: ChunkProgram) -> Mutant:
    """`of` with one mistake, drawn evenly from all kinds of mistakes that it can have."""
    while True:
        kind = rng.choice(list(MUTATIONS))
        draft = Draft(of)
        description = MUTATIONS[kind](rng, draft, rng.randrange(len(draft.sends)))
        if description is not None:
            return Mutant(kind, description, draft.projection(), draft.changed())


def same_as_project(of: ChunkProgram) -> bool:
    """Whether an unchanged draft is the program's projection."""
    projected, expected = Draft(of).projection(), project(of)
    return all(
        np.array_equal(
            getattr(getattr(projected, end), field.name), getattr(getattr(expected, end), field.name)
        )
        for end in ("sends", "receives")
        for field in dataclasses.fields(Posts)
    )
