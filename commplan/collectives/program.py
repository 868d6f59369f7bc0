"""Chunk programs.

The buffer of a collective is divided into `chunks` parts, and every rank has a slot for each. An algorithm is
a sequence of rounds, and a round is a set of transfers: `src` sends the content of `chunk` before the round
to the same slot of `dst`, which stores it (`copy`) or adds it to its content (`reduce`). There are no other
operations.

Slots of a `swap` (all-to-all) are numbered by distance, so that its transfers have this form too: slot d of
rank r begins with r's block for rank r + d and ends with the block of rank r - d. In a hierarchy the sum is
computed level by level; `ChunkProgram.targets` has the destination of the initial block of each slot.

In a round, a slot receives at most one transfer. A rank may send to several ranks and receive from several.
All transfers of a round from one rank to another form one message, with several runs of chunks.

Rounds are functions of the rank. Evaluated for all ranks at once, they are NumPy arrays with one entry per
transfer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from commplan.ir.collective_kinds import BLOCKED

Kind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "swap"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
# The buffer consists of one block per rank; in `BLOCKED`, that of rank r is chunks r*c to (r+1)*c - 1 of n*c.
IN_BLOCKS = (*BLOCKED, "swap")

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NO_TARGETS = np.zeros((0, 0), np.int64)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Send:
    """Transfers of one round, one for each index of the arrays, which have equal lengths.

    `src` sends chunks `chunk` to `chunk + count - 1`, which do not wrap around, to the same slots of `dst`.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints
    reduce: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """Transfers of one round that are the same on all ranks, in a program with as many chunks as ranks.

    Rank r sends chunks `r + first` to `r + first + length - 1` to rank `r + step`, all modulo `ranks`. The
    columns of the equivalent `Send` are computed on access, so that a round needs no memory per rank. A run
    of chunks that wraps around becomes two transfers.
    """

    ranks: int
    step: int
    first: int
    length: int = 1
    reduce: bool = False

    def __post_init__(self) -> None:
        if not self.step % self.ranks or not 1 <= self.length <= self.ranks:
            raise ValueError(f"{self} is no message to another rank")

    @property
    def src(self) -> Ints:
        return np.concatenate([ranks(self.ranks), self._wrapped])

    @property
    def dst(self) -> Ints:
        return (self.src + self.step) % self.ranks

    @property
    def chunk(self) -> Ints:
        return np.concatenate([self._starts, np.zeros_like(self._wrapped)])

    @property
    def count(self) -> Ints:
        head = np.minimum(self.length, self.ranks - self._starts)
        return np.concatenate([head, self.length - head[self._wrapped]])

    @property
    def _starts(self) -> Ints:
        return (ranks(self.ranks) + self.first) % self.ranks

    @property
    def _wrapped(self) -> Ints:
        """The ranks whose run of chunks wraps around."""
        return np.flatnonzero(self._starts + self.length > self.ranks)


Family = Send | Rotation
Round = tuple[Family, ...]


class RoundSequence(NamedTuple):
    """The result of an algorithm for n ranks and root 0: the number of chunks, and the rounds.

    Kinds in `IN_BLOCKS` have as many chunks as ranks. Rounds are generated lazily and can be iterated over
    once.
    """

    chunks: int
    rounds: Iterable[Round]


Programs = Mapping[Kind, Callable[[int], RoundSequence]]


class AlgorithmFile(Protocol):
    """The interface of a module with an algorithm. The name of the module is the name of the algorithm."""

    @property
    def PROGRAMS(self) -> Programs:  # noqa: N802
        """For each supported collective, a function from the number of ranks to its rounds."""
        ...

    @property
    def formula(self) -> Callable[[Kind, int], tuple[int, Fraction]]:
        """A function from kind and n to the number of rounds and the fraction of S on the busiest rank.

        The fraction is the maximum over sending and receiving.
        """
        ...


def ranks(n: int) -> Ints:
    """The ranks 0 to n-1, the argument of functions that define rounds."""
    return np.arange(n, dtype=np.int64)


def log2_up(n: int) -> int:
    """The least k with 2**k >= n; n is at least 1."""
    return (n - 1).bit_length()


def send(
    rank: Ints,
    to: Ints | int,
    chunk: Ints | int,
    count: Ints | int = 1,
    *,
    reduce: bool = False,
    where: Bools | None = None,
) -> Send:
    """The transfers of all ranks in one round.

    Args:
        rank: The senders.
        to: The receiver of each transfer.
        chunk: The first chunk.
        count: The number of chunks.
        reduce: Whether receivers add the chunks.
        where: A mask of the transfers to keep.
    """
    columns = np.broadcast_arrays(rank, to, chunk, count)
    src, dst, first, many = (np.asarray(column, np.int64).ravel() for column in columns)
    if where is None:
        return Send(src, dst, first, many, reduce)
    return Send(src[where], dst[where], first[where], many[where], reduce)


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkProgram:
    """A chunk program for `ranks` ranks. `name` is its name in a `via` clause.

    `targets` [ranks, ranks] is, for a swap, the destination of the initial block of each slot of each rank, a
    Latin square.
    """

    name: str
    kind: Kind
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]
    root: int = 0
    targets: Ints = dataclasses.field(default_factory=lambda: NO_TARGETS)

    @property
    def sources(self) -> Ints:
        """For a swap, the source of the final block of each slot of each rank, [ranks, ranks]."""
        return np.argsort(self.targets, axis=0)

    @property
    def arrivals(self) -> Ints:
        """For a swap, the slot of each rank that ends with the block from each rank, [ranks, ranks]."""
        return np.argsort(self.sources, axis=1)
