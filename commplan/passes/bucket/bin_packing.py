"""Which leaves share a buffer: a row of buffers, each filled up to a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from commplan.ir.plan import Ref
from commplan.ir.schedule import CollectiveKind
from commplan.ir.types import DType

WHOLE = 4  # a leaf of up to so many limits travels whole
MOST = 100_000  # buckets that leaves of one stage are cut into, at most
PIECE = 2  # pieces of one that is larger are of at most so many limits
LeafCollective = CollectiveKind | None  # what happens to a leaf; None: it is already what the result wants


class LeafSlice(msgspec.Struct, frozen=True):
    """A leaf on its way into a buffer: `columns` elements in each of `ways` rows."""

    value: Ref
    result: Ref
    leaf: int
    dtype: DType
    columns: int
    ways: int
    fate: LeafCollective
    place: int  # in order of readiness

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.columns * self.ways * self.dtype.nbytes


class Bucket(msgspec.Struct):
    """A buffer being filled: runs of items, each (item, first column, columns), `columns` in all."""

    dtype: DType
    ways: int
    fate: LeafCollective
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
        """Whether it holds a part of one leaf."""
        return self.runs[0][2] < self.runs[0][0].columns


def fill(items: Sequence[LeafSlice], limit: int | None) -> list[Bucket]:
    """Items into buckets, first come first in; buckets in the order in which they are complete.

    A leaf larger than the limit has a bucket of its own and stays whole up to `WHOLE` limits: its
    pieces would be ready at the same moment, so that all but the last have nothing to travel under,
    and each piece is a copy where a whole leaf is a reshape. A giant leaf, larger than that, is cut
    into equal pieces of at most `PIECE` limits, which bounds the buffers.
    """
    closed: list[Bucket] = []
    open_: dict[tuple[DType, int, LeafCollective], Bucket] = {}
    for item in items:
        key = (item.dtype, item.ways, item.fate)
        bucket = open_.get(key)
        if bucket is not None and limit is not None and bucket.nbytes + item.nbytes > limit:
            closed.append(open_.pop(key))
            bucket = None
        if limit is not None and item.nbytes > limit:
            for start, size in _runs(item, limit):
                closed.append(Bucket(*key))
                closed[-1].add(item, start, size)
            continue
        if bucket is None:
            bucket = open_[key] = Bucket(*key)
        bucket.add(item, 0, item.columns)
    return sorted([*closed, *open_.values()], key=lambda bucket: bucket.last)


def halved(items: Sequence[LeafSlice]) -> tuple[int, int]:
    """Bytes of the larger and the smaller part where leaves are cut in two as evenly as can be. With the
    first as its limit `fill` makes these two, of leaves of one dtype.
    """
    whole = sum(item.nbytes for item in items)
    larger = min((max(part, whole - part) for part in accumulate(item.nbytes for item in items)), default=0)
    return larger, whole - larger


def pieces(item: LeafSlice, limit: int | None) -> int:
    """How many buckets a leaf is cut into, where no bucket but its own may pass `limit` bytes."""
    row = item.dtype.nbytes * item.ways
    if limit is None or item.columns * row <= WHOLE * limit:
        return 1
    return -(-item.columns // max(1, PIECE * limit // row))


def _runs(item: LeafSlice, limit: int) -> list[tuple[int, int]]:
    """A leaf larger than `limit` bytes as one run, or a giant one as equal runs: (first column, columns)."""
    count = pieces(item, limit)
    step = -(-item.columns // count)
    return [(start, min(step, item.columns - start)) for start in range(0, item.columns, step)]
