"""Audits at run time that each epoch visited the records that the plan promises.

A list of all visited records would be too large. The audit keeps a few numbers that do not depend on the
order of records or their assignment to steps: the count, and the sum modulo 2**64 of the record ids, each
mixed by a fixed permutation of the 64-bit numbers. Such sums are multiset hashes (Clarke, Devadas, van Dijk,
Gassend and Suh, "Incremental multiset hash functions", 2003): another multiset of ids has the same count and
sum with probability 2**-64. The sum of the plain ids and their extremes are kept too, to identify a single
record that is missing or duplicated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span
from commplan.input.order import MASK, Order, mixed_array, permuted

Ids = npt.NDArray[np.int64]  # numbers of records, of any shape

_BLOCK = 1 << 16  # ids per block: the arrays of a block fit in a core's cache
_SEARCHED = 1 << 26  # candidates: a search for a replaced record does not begin with more


@dataclass(frozen=True)
class RecordSums:
    """A summary of a multiset of record ids.

    Attributes:
        count: The number of ids.
        total: The sum of the mixed ids modulo 2**64.
        plain: The sum of the ids.
        low: The smallest id, or a lower bound of it; -1 if there are no ids.
        high: The largest id, or an upper bound of it; -1 if there are no ids.
    """

    count: int = 0
    total: int = 0
    plain: int = 0
    low: int = -1
    high: int = -1

    def __add__(self, other: RecordSums) -> RecordSums:
        if not self.count or not other.count:
            return self if self.count else other
        low, high = min(self.low, other.low), max(self.high, other.high)
        total = (self.total + other.total) & MASK
        return RecordSums(self.count + other.count, total, self.plain + other.plain, low, high)

    def times(self, number: int) -> RecordSums:
        """The summary of the multiset repeated `number` times."""
        if not number:
            return RecordSums()
        total = self.total * number & MASK
        return RecordSums(self.count * number, total, self.plain * number, self.low, self.high)

    def same(self, other: RecordSums) -> bool:
        """Whether both summarize the same multiset, with high probability (see the module)."""
        return (self.count, self.total) == (other.count, other.total)


def sums(ids: Ids) -> RecordSums:
    """The summary of `ids`, non-negative int64 of any shape."""
    if not ids.size:
        return RecordSums()
    total = int(mixed_array(ids.astype(np.uint64).ravel()).sum(dtype=np.uint64))
    return RecordSums(ids.size, total, int(ids.sum()), int(ids.min()), int(ids.max()))


class EpochTally:
    """The records that one member received in one epoch. Uses constant memory; not thread-safe.

    Attributes:
        sums: The summary of the ids in all slots that count as visits, including skipped records.
        skipped: The number of skipped records.
    """

    def __init__(self) -> None:
        self.sums = RecordSums()
        self.skipped = 0

    def add(self, ids: Ids, skipped: int = 0) -> None:
        """Add a batch.

        Args:
            ids: The ids in the slots that count as visits, of any shape, including skipped records.
            skipped: The number of records that failed and were skipped.
        """
        self.sums += sums(ids)
        self.skipped += skipped


def _blocks(low: int, high: int) -> Iterator[Ids]:
    """The numbers [low, high) in blocks."""
    return (np.arange(start, min(start + _BLOCK, high)) for start in range(low, high, _BLOCK))


@functools.lru_cache(maxsize=16)
def _all(length: int) -> RecordSums:
    """The summary of every record of a source."""
    return sum(map(sums, _blocks(0, length)), RecordSums())


def _stretch(order: Order, epoch: int, member: int | None, low: int, high: int) -> RecordSums:
    """The summary of the records at positions [low, high), which wrap around at the length of the source."""
    blocks = (block % order.length for block in _blocks(low, high))
    return sum(
        (sums(permuted(positions, order.length, order.seed, epoch, member)) for positions in blocks),
        RecordSums(),
    )


def expected_sums(
    order: Order, epoch: int, member: int | None = None, *, start: int = 0, steps: int | None = None,
    shards: Sequence[int] = (), ways: int = 1,
) -> RecordSums:  # fmt: skip
    """The expected summary of a member's records from step `start` to the end of an epoch.

    Whole epochs cost one sum over all record numbers per source length. Only records that are omitted or
    repeated are looked up in the order. If a process has only some of the shards, all of its records are
    looked up.

    Args:
        order: The order of the load.
        epoch: The epoch.
        member: The member, or None if all members have the same order.
        start: The first step.
        steps: The number of steps of the epoch, if other loads of the phase determine it; None for
            `order.steps`.
        shards: The shards that the process has. Ignored if `ways` is 1.
        ways: The number of shards of a batch; 1 if the load is not split.
    """
    end = order.steps if steps is None else steps
    if ways > 1 and len(shards) < ways:
        return _shards(order, epoch, member, range(start, end), shards, ways)

    # The counted records are those at positions [first, last), which may exceed one pass over the source.
    first = order.span(start)[0]
    last = order.span(end - 1)[0] + order.counted(end - 1) if end else 0
    if order.visit != "at_least_once":
        last = min(last, order.length)
    if last <= first:
        return RecordSums()
    if not first and last == order.length:
        return _all(order.length)
    if last <= order.length < 2 * (last - first):  # fewer records are omitted than visited
        before = _stretch(order, epoch, member, 0, first)
        after = _stretch(order, epoch, member, last, order.length)
        return _less(_all(order.length), before + after, order)
    whole, remainder = divmod(last - first, order.length)
    return _all(order.length).times(whole) + _stretch(order, epoch, member, first, first + remainder)


def _less(whole: RecordSums, part: RecordSums, order: Order) -> RecordSums:
    """`whole` without its subset `part`. Its `low` and `high` are those of the whole source."""
    total = (whole.total - part.total) & MASK
    return RecordSums(whole.count - part.count, total, whole.plain - part.plain, 0, order.length - 1)


def _shards(
    order: Order, epoch: int, member: int | None, step_range: range, shards: Sequence[int], ways: int
) -> RecordSums:
    """The summary of the counted records in some of the `ways` equal shards of each step."""
    total = RecordSums()
    for step in step_range:
        ids = order.records(epoch, step, member)
        counted = order.counted(step)  # the first slots of the batch
        shard_rows = len(ids) // ways
        for shard in shards:
            low = shard * shard_rows
            total += sums(ids[low : max(low, min(low + shard_rows, counted))])
    return total


@dataclass(frozen=True)
class EpochContext:
    """The epoch of an audit, for messages.

    Attributes:
        source: The name of the source.
        visit: The visit of the load, such as `exactly_once`.
        epoch: The epoch.
        member: The member's name and index in words, or "" if all members have the same order.
        span: The load in the plan; None for a message without a line.
        file: The file of the plan; "" for a message without a file.
    """

    source: str
    visit: str
    epoch: int
    member: str = ""
    span: Span | None = None
    file: str = ""


def check(tally: EpochTally, expected: RecordSums, context: EpochContext, length: int) -> None:
    """Check that the records of an epoch are the expected ones.

    Args:
        tally: The records that the member received.
        expected: The summary of the expected records.
        context: The epoch, for the message.
        length: The number of records of the source.

    Raises:
        CommplanError: CP0763 if they differ. The message has the number of missing or extra records, and
            identifies a single wrong record.
    """
    if tally.sums.same(expected):
        return
    whose = f" for {context.member}" if context.member else ""
    message = f"epoch {context.epoch} of `{context.source}`{whose} was not visited {context.visit}"
    notes = (
        f"expected {_words(expected)}",
        f"found {_words(tally.sums)}" + (f", {tally.skipped} of them skipped" if tally.skipped else ""),
        *_culprit(tally.sums, expected, length),
        "the training did not visit the records as the plan promises",
        "the length and the records of a source must not change while it is read",
    )
    raise CommplanError(
        Diagnostic("CP0763", message, context.span, tuple(Note(note) for note in notes), file=context.file)
    )


def _words(summary: RecordSums) -> str:
    if not summary.count:
        return "no records"
    return f"{summary.count} records from {summary.low} to {summary.high}, checksum {summary.total:016x}"


def _culprit(actual: RecordSums, expected: RecordSums, length: int) -> tuple[str, ...]:
    """Descriptions of the records that are missing or too many."""
    more = actual.count - expected.count
    # With a single wrong record, `gap` is the extra id, the negative of the missing id, or their difference.
    gap = actual.plain - expected.plain
    mixed = (actual.total - expected.total) & MASK  # the same for the mixed ids
    if actual.high >= length:
        return (f"record {actual.high} does not exist: the source has {length}",)
    if more == 1 and 0 <= gap < length and sums(np.array([gap])).total == mixed:
        return (f"record {gap} was visited once too often",)
    if more == -1 and 0 <= -gap < length and -sums(np.array([-gap])).total & MASK == mixed:
        return (f"record {-gap} is missing",)
    if more:
        records = "1 record is" if abs(more) == 1 else f"{abs(more)} records are"
        return (f"at least {records} {'too many' if more > 0 else 'missing'}",)
    swapped = _find_replaced(gap, mixed, length)
    if swapped is None:
        return ("some records are missing, and as many were visited too often",)
    return (f"record {swapped} is missing, and record {swapped + gap} was visited instead",)


def _find_replaced(gap: int, mixed: int, length: int) -> int | None:
    """The record that was replaced by the one `gap` further on.

    Args:
        gap: The id of the replacement minus the id of the replaced record.
        mixed: The difference of their mixed ids, modulo 2**64.
        length: The number of records of the source.

    Returns:
        The first record that fits, or None if there is none or the search would take too long.
    """
    low = max(0, -gap)
    high = min(length, length - gap)
    if high - low > _SEARCHED:
        return None
    for records in _blocks(low, high):
        gaps = mixed_array((records + gap).astype(np.uint64)) - mixed_array(records.astype(np.uint64))
        matches = np.flatnonzero(gaps == np.uint64(mixed))
        if matches.size:
            return int(records[matches[0]])
    return None
