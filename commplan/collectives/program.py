"""Chunk programs: the notation of collective algorithms, and the interface of a module that defines one.

The buffer of a collective is divided into `chunks` parts, and every rank has a slot for each. An algorithm is
a sequence of rounds, and a round is a set of transfers: `src` sends the content of `chunk` before the round
to the same slot of `dst`, which stores it (`copy`) or adds it to its content (`reduce`). There are no other
operations.

Slots of a `swap` (all-to-all) are numbered by distance, so that its transfers have this form too: slot d of
rank r begins with r's block for rank r + d and ends with the block of rank r - d. In a hierarchy the sum is
computed level by level; `ChunkProgram.targets` has the destination of the initial block of each slot.

In a round, a slot receives at most one transfer. A rank may send to several ranks and receive from several.
All transfers of a round from one rank to another form one message, with one or more runs of chunks.

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

# The collectives of chunk programs. The kinds of a schedule are `ir.ops.collective.CollectiveKind`.
Kind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "swap"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
# The kinds whose buffer consists of one block per rank. With n ranks and n*c chunks, the block of rank r is
# chunks r*c to (r+1)*c - 1. In a swap, these chunks are the block of slot r.
IN_BLOCKS = (*BLOCKED, "swap")

# Arrays of ranks, chunks or counts, and masks.
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# `ChunkProgram.targets` of a program that is not a swap.
NO_TARGETS = np.zeros((0, 0), np.int64)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Send:
    """Transfers of one round, one for each index of the arrays, which have equal lengths.

    Attributes:
        src: The sending rank of each transfer.
        dst: The receiving rank.
        chunk: The first chunk, and the slot that receives it.
        count: The number of consecutive chunks, at least 1. A run does not wrap around the end of the buffer.
        reduce: Whether receivers add the chunks to their slots; otherwise they store them.
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
    columns of the equivalent `Send` (`src`, `dst`, `chunk`, `count`) are computed on access, so that a round
    needs no memory per rank. A run of chunks that wraps around becomes two transfers.

    Attributes:
        ranks: The number of ranks, which is the number of chunks.
        step: The distance from the sender to the receiver; may be negative, but is no multiple of `ranks`.
        first: The first chunk that rank 0 sends; may be negative.
        length: The number of chunks that each rank sends, 1 to `ranks`.
        reduce: Whether receivers add the chunks to their slots; otherwise they store them.

    Raises:
        ValueError: If `step` or `length` is out of range.
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
        return np.concatenate([rank_range(self.ranks), self._wrapped])

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
        """The first chunk that each rank sends."""
        return (rank_range(self.ranks) + self.first) % self.ranks

    @property
    def _wrapped(self) -> Ints:
        """The ranks whose run of chunks wraps around."""
        return np.flatnonzero(self._starts + self.length > self.ranks)


# Transfers of one round for all ranks, as functions of the rank.
Family = Send | Rotation
# The transfers of a round are those of all its families.
Round = tuple[Family, ...]


class RoundSequence(NamedTuple):
    """The result of an algorithm for n ranks, with root 0 except in `hierarchical.composed`.

    Attributes:
        chunks: The number of chunks; n for kinds in `IN_BLOCKS`.
        rounds: The rounds. They may be generated lazily, so they can be iterated over only once. Sends
            without transfers and empty rounds are allowed (`transform.drop_empty`).
    """

    chunks: int
    rounds: Iterable[Round]


# For each supported collective, a function from the number of ranks to the rounds.
Programs = Mapping[Kind, Callable[[int], RoundSequence]]


class AlgorithmFile(Protocol):
    """The interface of a module with an algorithm. The name of the module is the name of the algorithm."""

    @property
    def PROGRAMS(self) -> Programs:  # noqa: N802
        """For each supported collective, a function from the number of ranks, 1 or more, to its rounds."""
        ...

    @property
    def formula(self) -> Callable[[Kind, int], tuple[int, Fraction]]:
        """A function from kind and n to the number of rounds and the fraction of S on the busiest rank.

        S is the bytes of the buffer. The fraction is the maximum over ranks of the bytes that a rank sends
        or receives, whichever are more, divided by S.
        """
        ...


def rank_range(n: int) -> Ints:
    """The ranks 0 to n-1 as an array [n]: the usual first argument of `send`."""
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
    """Build a `Send` from functions of the rank.

    The first four arguments are broadcast against each other; each element is one transfer.

    Args:
        rank: The senders.
        to: The receivers.
        chunk: The first chunk of each transfer.
        count: The number of consecutive chunks of each transfer.
        reduce: Whether receivers add the chunks instead of storing them.
        where: A mask [transfers] of the transfers to keep, in row-major order of the broadcast shape; None
            keeps all. Transfers that are not kept may have ranks or chunks out of range.
    """
    columns = np.broadcast_arrays(rank, to, chunk, count)
    src, dst, first, many = (np.asarray(column, np.int64).ravel() for column in columns)
    if where is None:
        return Send(src, dst, first, many, reduce)
    return Send(src[where], dst[where], first[where], many[where], reduce)


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkProgram:
    """A chunk program.

    Attributes:
        name: The name of the algorithm, as in a `via` clause.
        kind: The collective.
        ranks: The number of ranks.
        chunks: The number of chunks; a multiple of `ranks` for kinds in `IN_BLOCKS`.
        rounds: The rounds, in order.
        root: The rank that has or receives the whole buffer; meaningless for a kind without a root.
        targets: For a swap, the destination of the initial block of each slot of each rank, [ranks, ranks],
            a Latin square; else `NO_TARGETS`.
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
