"""What a chunk program is.

The buffer of a collective is cut into `chunks` parts, and every rank has a slot for each. An algorithm is a
sequence of rounds; a round is a set of transfers: `src` sends what it held in `chunk` before the round to the
same slot of `dst`, which takes it over (`copy`) or adds its own to it (`reduce`). Nothing else happens.

Slots of a `swap` (all-to-all) are counted by distance, so that its transfers are of this form, too: slot d of
rank r begins with r's block for rank r + d and ends with the block of rank r - d. In a hierarchy that sum is
made level by level; `Program.targets` says whose block each slot begins with.

Within a round a slot takes in at most one transfer. A rank may send to several ranks and receive from
several; all transfers of a round from one rank to another are one message, of several runs of chunks.

Rounds are written as functions of the rank. Evaluated for all ranks at once they are NumPy arrays, one entry
for each transfer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

Kind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "swap"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
REDUCING: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "reduce")
ROOTED: tuple[Kind, ...] = ("broadcast", "reduce", "scatter", "gather")
# Where every rank has a block of its own: chunks r*c to (r+1)*c - 1 of n*c are the block of rank r.
BLOCKED: tuple[Kind, ...] = ("reduce_scatter", "all_gather", "scatter", "gather")
IN_BLOCKS: tuple[Kind, ...] = (*BLOCKED, "swap")  # the buffer is as many equal blocks as there are ranks

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NO_TARGETS = np.zeros((0, 0), np.int64)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Send:
    """Transfers of one round, one for each index of the arrays, which are equally long.

    `src` sends chunks `chunk` to `chunk + count - 1`, a run that does not wrap around, to the same slots of
    `dst`.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints
    reduce: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """Transfers of one round that are alike on all ranks, in a program of as many chunks as ranks.

    Rank r sends chunks `r + first` to `r + first + length - 1` to rank `r + step`, all modulo `ranks`. The
    columns are those of a `Send`, computed when they are read: a round takes no memory for each rank. A run
    of chunks that wraps around is two transfers.
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


class Body(NamedTuple):
    """What an algorithm makes for n ranks, root 0: the number of chunks, and the rounds.

    Of the kinds in `IN_BLOCKS` there are as many chunks as ranks. Nothing is written out before the rounds
    are iterated over, which may be done once.
    """

    chunks: int
    rounds: Iterable[Round]


Programs = Mapping[Kind, Callable[[int], Body]]


class AlgorithmFile(Protocol):
    """What a module that holds an algorithm has; its name is the name of the algorithm."""

    @property
    def PROGRAMS(self) -> Programs:  # noqa: N802
        """The body for n ranks, of each collective that the algorithm carries out."""
        ...

    @property
    def formula(self) -> Callable[[Kind, int], tuple[int, Fraction]]:
        """Of kind and n: rounds, and the share of S that the busiest rank sends or receives, whichever is
        more."""
        ...


def ranks(n: int) -> Ints:
    """The ranks 0 to n-1: what rounds are written as functions of."""
    return np.arange(n, dtype=np.int64)


def log2_up(n: int) -> int:
    """The least k for which 2**k >= n; n is at least 1."""
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
    """What each rank sends: `to` whom, from which `chunk` on, how many; `where` leaves ranks out."""
    columns = np.broadcast_arrays(rank, to, chunk, count)
    src, dst, first, many = (np.asarray(column, np.int64).ravel() for column in columns)
    if where is None:
        return Send(src, dst, first, many, reduce)
    return Send(src[where], dst[where], first[where], many[where], reduce)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A chunk program for `ranks` ranks. `name` is how a user would write it after `via`.

    targets: of a swap, for which rank the block is that each slot of each rank begins with, [ranks, ranks]:
    a Latin square.
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
        """Of a swap, from which rank the block is that each slot of each rank ends with, [ranks, ranks]."""
        return np.argsort(self.targets, axis=0)

    @property
    def arrivals(self) -> Ints:
        """Of a swap the slot of each rank that ends with the block from each rank, [ranks, ranks]."""
        return np.argsort(self.sources, axis=1)
