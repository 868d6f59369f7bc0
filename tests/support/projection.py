"""A chunk program as ranks execute it: each has a separate sequence of rounds.

A rank enters a round, posts all its sends and receives at once, and leaves when all have completed. A send
completes only when its receive is posted (rendezvous). Messages between two ranks are matched in the order of
posting, each run of chunks separately: runs that match one by one also match as one message. There is no
other ordering between ranks: if one end is changed, the two need not match any more.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from commplan.collectives.program import NO_TARGETS, Bools, ChunkProgram, Ints, Kind


@dataclasses.dataclass(frozen=True, eq=False)
class Posts:
    """The posted ends of messages, one entry each, in the order of rank, round and posting.

    Attributes:
        rank: the rank that posts it.
        round: its round; a rank executes its rounds in rising order.
        peer: the other rank.
        chunk, size: chunks `chunk` to `chunk + size - 1`.
        reduce: the operation of a receive (without meaning in sends).
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
    """The projection of `program` to each rank."""
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
