"""A chunk program as ranks execute it: each has its own sequence of rounds and sees no other's.

A rank enters a round, posts all its sends and receives at once, and leaves when all have completed. A send
completes only when its receive is posted (rendezvous). Between two ranks messages are matched in the order in
which they were posted, each run of chunks for itself: runs that fit one by one also fit as one message.
Nothing else orders the ranks: that rounds of a program fit together is what is to be proved, not assumed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import Bools, Ints, Kind, Program


@dataclasses.dataclass(frozen=True, eq=False)
class Posts:
    """What ranks post, one entry for each end of a message, in the order of rank and round, then as posted.

    rank: whose it is. round: in which of its rounds; a rank goes through the numbers it has in rising order.
    peer: to or from whom. chunk, size: chunks `chunk` to `chunk + size - 1`. reduce: what a receive does
    (without meaning in sends).
    """

    rank: Ints
    round: Ints
    peer: Ints
    chunk: Ints
    size: Ints
    reduce: Bools

    def take(self, which: Ints | Bools) -> Posts:
        """The entries `which`, in that order."""
        return Posts(
            self.rank[which], self.round[which], self.peer[which], self.chunk[which], self.size[which],
            self.reduce[which],
        )  # fmt: skip

    def ordered(self) -> Posts:
        """By rank and round; those of one round keep their order."""
        return self.take(np.lexsort((self.round, self.rank)))


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """The sends and the receives of all ranks. `name` and `root` as in `Program`."""

    name: str
    kind: Kind
    ranks: int
    chunks: int
    sends: Posts
    receives: Posts
    root: int = 0


class Post(NamedTuple):
    """One end of a message: the `number`-th from or to `peer`, in the order of posting."""

    peer: int
    chunk: int
    size: int
    number: int
    reduce: bool = False


class LocalRound(NamedTuple):
    """One round of one rank."""

    round: int
    sends: tuple[Post, ...]
    receives: tuple[Post, ...]


def project(program: Program) -> Projection:
    """What every rank of `program` executes."""
    timed = [(time, family) for time, families in enumerate(program.rounds) for family in families]
    sizes = [len(family.src) for _, family in timed]
    time = np.repeat(np.array([time for time, _ in timed], np.int64), sizes)
    reduce = np.repeat(np.array([family.reduce for _, family in timed], np.bool_), sizes)
    src, dst = _joined([family.src for _, family in timed]), _joined([family.dst for _, family in timed])
    chunk, size = (
        _joined([family.chunk for _, family in timed]),
        _joined([family.count for _, family in timed]),
    )
    nothing = np.zeros(len(src), np.bool_)
    return Projection(
        program.name,
        program.kind,
        program.ranks,
        program.chunks,
        Posts(src, time, dst, chunk, size, nothing).ordered(),
        Posts(dst, time, src, chunk, size, reduce).ordered(),
        program.root,
    )


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *columns])


def rounds_of(projection: Projection, rank: int) -> tuple[LocalRound, ...]:
    """The rounds of one rank in the order in which it goes through them."""
    sends = _posts(projection.sends, rank)
    receives = _posts(projection.receives, rank)
    return tuple(
        LocalRound(number, tuple(sends.get(number, ())), tuple(receives.get(number, ())))
        for number in sorted({*sends, *receives})
    )


def _posts(posts: Posts, rank: int) -> dict[int, list[Post]]:
    mine = posts.take(posts.rank == rank)
    found: dict[int, list[Post]] = {}
    numbers: dict[int, int] = {}
    for number, peer, chunk, size, reduce in zip(
        mine.round.tolist(), mine.peer.tolist(), mine.chunk.tolist(), mine.size.tolist(),
        mine.reduce.tolist(), strict=True,
    ):  # fmt: skip
        place = numbers[peer] = numbers.get(peer, -1) + 1
        found.setdefault(number, []).append(Post(peer, chunk, size, place, reduce))
    return found
