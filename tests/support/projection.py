"""A chunk program as ranks execute it: each has its own sequence of rounds and sees no other's.

A rank enters a round, posts all its sends and receives at once, and leaves when all have completed. A send
completes only when its receive is posted (rendezvous). Between two ranks messages are matched in the order in
which they were posted, each run of chunks for itself: runs that fit one by one also fit as one message.
Nothing else orders the ranks: what was changed at one end alone need not fit together any more.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from commplan.collectives.program import NO_TARGETS, Bools, ChunkProgram, Ints, Kind


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
    """The sends and the receives of all ranks. `name`, `root` and `targets` as in `ChunkProgram`."""

    name: str
    kind: Kind
    ranks: int
    chunks: int
    sends: Posts
    receives: Posts
    root: int = 0
    targets: Ints = dataclasses.field(default_factory=lambda: NO_TARGETS)

    @property
    def head(self) -> ChunkProgram:
        """Its numbers, as a program without rounds."""
        return ChunkProgram(self.name, self.kind, self.ranks, self.chunks, (), self.root, self.targets)


def project(program: ChunkProgram) -> Projection:
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
        program.targets,
    )


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *columns])
