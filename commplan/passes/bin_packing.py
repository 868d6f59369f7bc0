"""Assign leaves to buffers, each filled up to a limit in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from commplan.ir.plan import Ref
from commplan.ir.schedule import CollectiveKind
from commplan.ir.types import DType

WHOLE = 4  # leaves are not split up to this multiple of the limit
MOST = 100_000  # maximum number of buckets of one stage
PIECE = 2  # size of a piece of a larger leaf, as a multiple of the limit
LeafCollective = CollectiveKind | None  # the collective for a leaf; None if the operand equals the result


class LeafSlice(msgspec.Struct, frozen=True):
    """A leaf to be packed: `columns` elements in each of `ways` rows."""

    value: Ref
    result: Ref
    leaf: int
    dtype: DType
    columns: int
    ways: int
    leaf_collective: LeafCollective
    place: int  # in order of readiness

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.columns * self.ways * self.dtype.nbytes


class LeafBucket(msgspec.Struct):
    """A buffer being filled: runs (item, first column, columns) with `columns` columns in total."""

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
        return self.runs[-1][0].place

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.columns * self.ways * self.dtype.nbytes

    @property
    def is_piece(self) -> bool:
        """Whether the bucket contains only part of a leaf."""
        return self.runs[0][2] < self.runs[0][0].columns


def fill(items: Sequence[LeafSlice], limit: int | None) -> list[LeafBucket]:
    """Assign items to buckets in order of arrival; returns buckets in order of completion.

    A leaf larger than the limit gets a separate bucket, and is not split up to `WHOLE` limits: pieces of a
    leaf become ready at the same time, so all but the last have nothing to overlap with, and packing a piece
    is a copy, whereas packing a whole leaf is a reshape. Larger leaves are split into equal pieces of at most
    `PIECE` limits, which bounds the buffers.
    """
    closed: list[LeafBucket] = []
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
    """Bytes of the larger and the smaller part in the most even split of `items` into two.

    With the first as its limit, `fill` creates these two buckets if the leaves have one dtype.
    """
    whole = sum(item.nbytes for item in items)
    larger = min((max(part, whole - part) for part in accumulate(item.nbytes for item in items)), default=0)
    return larger, whole - larger


def pieces(item: LeafSlice, limit: int | None) -> int:
    """Number of buckets into which a leaf is split, if each is limited to `limit` bytes."""
    row = item.dtype.nbytes * item.ways
    if limit is None or item.columns * row <= WHOLE * limit:
        return 1
    return -(-item.columns // max(1, PIECE * limit // row))


def _runs(item: LeafSlice, limit: int) -> list[tuple[int, int]]:
    """Split a leaf larger than `limit` bytes into equal runs (first column, columns)."""
    count = pieces(item, limit)
    step = -(-item.columns // count)
    return [(start, min(step, item.columns - start)) for start in range(0, item.columns, step)]
