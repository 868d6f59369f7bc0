"""Assigns leaves to buffers, each filled up to a limit in bytes.

`packing` emits a collective for each of the resulting buckets, for the pass `bucket` and others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from commplan.ir.plan import Ref
from commplan.ir.schedule import CollectiveKind
from commplan.ir.types import DType

WHOLE = 4  # the maximum size of a leaf that is not split, as a multiple of the limit
MOST = 100_000  # maximum number of pieces of the split leaves of one stage
PIECE = 2  # maximum size of a piece of a larger leaf, as a multiple of the limit
LeafCollective = CollectiveKind | None  # the collective for a leaf; None if the operand equals the result


class LeafSlice(msgspec.Struct, frozen=True):
    """A leaf to be packed, as a matrix of `ways` rows and `columns` columns (see `Pack`).

    Attributes:
        value: The operand that contains the leaf.
        result: The result of the collective on this operand.
        leaf: The index of the leaf in the operand.
        dtype: The type of its elements.
        columns: The number of elements in each row, including padding.
        ways: The number of rows: one for each rank if the collective scatters, else 1.
        leaf_collective: The collective for the leaf.
        position: Its position in the order of readiness, from 0.
    """

    value: Ref
    result: Ref
    leaf: int
    dtype: DType
    columns: int
    ways: int
    leaf_collective: LeafCollective
    position: int

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.columns * self.ways * self.dtype.nbytes


class LeafBucket(msgspec.Struct):
    """A buffer that is filled with runs of columns of leaves.

    Attributes:
        dtype: The type of all elements.
        ways: The number of rows of all leaves.
        leaf_collective: The collective for all leaves.
        runs: For each run, its leaf, its first column and its number of columns.
        columns: The number of columns of all runs.
    """

    dtype: DType
    ways: int
    leaf_collective: LeafCollective
    runs: list[tuple[LeafSlice, int, int]] = msgspec.field(default_factory=list[tuple[LeafSlice, int, int]])
    columns: int = 0

    def add(self, item: LeafSlice, start: int, size: int) -> None:
        self.runs.append((item, start, size))
        self.columns += size

    @property
    def last(self) -> int:
        """The position of its last leaf in the order of readiness."""
        return self.runs[-1][0].position

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.columns * self.ways * self.dtype.nbytes

    @property
    def is_piece(self) -> bool:
        """Whether the bucket contains only part of a leaf."""
        return self.runs[0][2] < self.runs[0][0].columns


def fill(items: Sequence[LeafSlice], limit: int | None) -> list[LeafBucket]:
    """Assign leaves to buckets in the order of readiness.

    A bucket contains leaves of equal dtype, rows and collective. A leaf larger than the limit gets a separate
    bucket. It is not split up to `WHOLE` limits, for two reasons. Pieces of a leaf become ready at the same
    time, so that all but the last have nothing to overlap with. Packing a piece is a copy, whereas packing a
    whole leaf is a reshape. Larger leaves are split into pieces of at most `PIECE` limits, to bound the
    buffers.

    Args:
        items: The leaves, in the order of readiness.
        limit: The maximum bytes of a bucket with several leaves; None for no limit.

    Returns:
        The buckets in the order of readiness of their last leaves.
    """
    closed: list[LeafBucket] = []
    # The buckets that may receive further leaves.
    open_: dict[tuple[DType, int, LeafCollective], LeafBucket] = {}
    for item in items:
        key = (item.dtype, item.ways, item.leaf_collective)
        bucket = open_.get(key)
        if bucket is not None and limit is not None and bucket.nbytes + item.nbytes > limit:
            closed.append(open_.pop(key))
            bucket = None
        if limit is not None and item.nbytes > limit:
            for start, size in _runs(item, limit):
                closed.append(LeafBucket(*key))
                closed[-1].add(item, start, size)
            continue
        if bucket is None:
            bucket = open_[key] = LeafBucket(*key)
        bucket.add(item, 0, item.columns)
    return sorted([*closed, *open_.values()], key=lambda bucket: bucket.last)


def halved(items: Sequence[LeafSlice]) -> tuple[int, int]:
    """Bytes of the larger and the smaller part in the most even split of `items` into two runs.

    With the first as its limit, `fill` creates two buckets of these sizes if the leaves can share a bucket.
    The smaller part is 0 if there are fewer than two leaves.
    """
    whole = sum(item.nbytes for item in items)
    larger = min((max(part, whole - part) for part in accumulate(item.nbytes for item in items)), default=0)
    return larger, whole - larger


def pieces(item: LeafSlice, limit: int | None) -> int:
    """The number of pieces into which `fill` splits a leaf: 1 up to `WHOLE` limits, and without a limit."""
    column_nbytes = item.dtype.nbytes * item.ways
    if limit is None or item.columns * column_nbytes <= WHOLE * limit:
        return 1
    return -(-item.columns // max(1, PIECE * limit // column_nbytes))


def _runs(item: LeafSlice, limit: int) -> list[tuple[int, int]]:
    """Split a leaf larger than `limit` bytes into runs: the first column and the number of columns of each.

    All runs but the last have the same size.
    """
    count = pieces(item, limit)
    step = -(-item.columns // count)
    return [(start, min(step, item.columns - start)) for start in range(0, item.columns, step)]
