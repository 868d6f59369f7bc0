"""The measured work: one collective over one tensor or many, its data, and its expected results.

Every element is a small integer in float32, so sums are exact in any order. The term of rank r carries the
factor 3**r: replacing a missing term by a repeated one gives a different number.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
KINDS = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
ITEM = 4  # bytes of a float32
PERIOD = 61
MOST_RANKS = 12  # 61 * (3**12 - 1) / 2 is below 2**24: exact in float32


class Work(msgspec.Struct, frozen=True):
    """A collective over float32 tensors, or `empty`: a call of the backend without data.

    Attributes:
        counts: the elements of each tensor: of the whole buffer (for reduce_scatter the operand, for
            all_gather the result), a multiple of the number of ranks for these two.
        how: the method, in the words of the system; empty is one call for each tensor.
    """

    kind: str
    counts: tuple[int, ...]
    how: str = ""

    @property
    def nbytes(self) -> int:
        return ITEM * sum(self.counts)


class Operation(Protocol):
    """A system's prepared work: allocated buffers, compiled programs. `note` is the system's choice, if
    any."""

    note: str = ""

    def fill(self, variant: int) -> None:
        """Put the operands of `variant` (0 or 1) in place. Not timed."""
        ...

    def run(self) -> None:
        """The collective, from operands in the system's own arrays to results in such. Timed."""
        ...

    def results(self) -> list[Floats]:
        """The results, a flat array for each tensor. Not timed."""
        ...


class System(Protocol):
    """One system in one process of the group."""

    rank: int
    ranks: int

    def prepare(self, work: Work) -> Operation: ...


def count_of(kind: str, nbytes: int, ranks: int) -> int:
    """Elements of a buffer of about `nbytes`: rounded up to equal blocks where ranks hold blocks."""
    count = max(1, nbytes // ITEM)
    return math.ceil(count / ranks) * ranks if kind in ("reduce_scatter", "all_gather") else count


def operand(work: Work, tensor: int, rank: int, ranks: int, variant: int) -> Floats:
    """The operand of `rank` for one tensor, flat."""
    count = work.counts[tensor]
    if work.kind == "broadcast" and rank != 0:
        return np.zeros(count, np.float32)
    if work.kind == "all_gather":
        return _terms(rank, np.arange(count // ranks), variant)
    return _terms(rank, np.arange(count), variant)


def wrong(work: Work, results: list[Floats], rank: int, ranks: int, variant: int) -> str:
    """The error in `results`; empty if every element is correct."""
    if work.kind == "empty":
        return ""
    if len(results) != len(work.counts):
        return f"{len(results)} results for {len(work.counts)} tensors"
    for tensor, result in enumerate(results):
        right = expected(work, tensor, rank, ranks, variant)
        if result.shape != right.shape:
            return f"tensor {tensor} of rank {rank} has shape {result.shape}, not {right.shape}"
        if not np.array_equal(result, right):
            at = int(np.flatnonzero(result != right)[0])
            return f"element {at} of tensor {tensor} on rank {rank} is {result[at]:.0f}, not {right[at]:.0f}"
    return ""


def expected(work: Work, tensor: int, rank: int, ranks: int, variant: int) -> Floats:
    """The expected final contents of one tensor of `rank`, flat."""
    count = work.counts[tensor]
    block = count // ranks
    match work.kind:
        case "all_reduce":
            return _sums(np.arange(count), ranks, variant)
        case "broadcast":
            return _terms(0, np.arange(count), variant)
        case "reduce_scatter":
            return _sums(np.arange(rank * block, (rank + 1) * block), ranks, variant)
        case "all_gather":
            return np.concatenate([_terms(r, np.arange(block), variant) for r in range(ranks)])
        case _:
            raise ValueError(f"no collective `{work.kind}`")


def _base(at: npt.NDArray[np.int64], variant: int) -> Floats:
    return ((at + 7 * variant) % PERIOD + 1).astype(np.float32)


def _terms(rank: int, at: npt.NDArray[np.int64], variant: int) -> Floats:
    return _base(at, variant) * np.float32(3**rank)


def _sums(at: npt.NDArray[np.int64], ranks: int, variant: int) -> Floats:
    return _base(at, variant) * np.float32((3**ranks - 1) // 2)
