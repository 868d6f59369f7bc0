"""The contract of a visit, checked while it runs: were the records of an epoch those that were promised?

Nobody can keep a list of all records of a large source. What is kept is a few numbers, whatever the order and
however the records are spread over steps: how many there were, and the sum modulo 2**64 of their ids, each
mixed by a fixed permutation of the 64-bit numbers. Such sums are multiset hashes (Clarke, Devadas, van Dijk,
Gassend and Suh, "Incremental multiset hash functions", 2003): another multiset of ids has the same count and
sum with a chance of 2**-64. The sum of the plain ids and their extremes are kept as well; with them a single
record that is missing or that came twice can be named.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span
from commplan.input.order import Order, mixed_array, permuted

Ids = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_BLOCK = 1 << 16  # ids at a time: what one block needs stays in a core's cache
_SEARCHED = 1 << 26  # records of a source in which a culprit is looked for, at most


@dataclass(frozen=True)
class Sums:
    """A multiset of record ids in a few numbers. count: how many. total: of the mixed ids, modulo 2**64.
    plain: of the ids themselves. low, high: the least and the greatest id, -1 where there are none."""

    count: int = 0
    total: int = 0
    plain: int = 0
    low: int = -1
    high: int = -1

    def __add__(self, other: Sums) -> Sums:
        if not self.count or not other.count:
            return self if self.count else other
        low, high = min(self.low, other.low), max(self.high, other.high)
        total = (self.total + other.total) & _MASK
        return Sums(self.count + other.count, total, self.plain + other.plain, low, high)

    def times(self, number: int) -> Sums:
        """The multiset taken `number` times."""
        if not number:
            return Sums()
        total = self.total * number & _MASK
        return Sums(self.count * number, total, self.plain * number, self.low, self.high)

    def same(self, other: Sums) -> bool:
        """Whether both are the same multiset (see the head of this module)."""
        return (self.count, self.total) == (other.count, other.total)


def sums(ids: Ids) -> Sums:
    """Of `ids`, int64 of any shape, each 0 or more."""
    if not ids.size:
        return Sums()
    total = int(mixed_array(ids.astype(np.uint64).ravel()).sum(dtype=np.uint64))
    return Sums(ids.size, total, int(ids.sum()), int(ids.min()), int(ids.max()))


class Tally:
    """What one member was given so far in one epoch. Constant in memory, for one thread at a time."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.skipped = 0

    def add(self, ids: Ids, skipped: int = 0) -> None:
        """A batch: the ids of its slots that count by the visit's contract, any shape, those of records
        included that were skipped because they failed; skipped: how many those are."""
        self.sums += sums(ids)
        self.skipped += skipped


def _blocks(low: int, high: int) -> Iterator[Ids]:
    """The numbers [low, high), some at a time."""
    return (np.arange(start, min(start + _BLOCK, high)) for start in range(low, high, _BLOCK))


@functools.lru_cache(maxsize=16)
def _all(length: int) -> Sums:
    """Every record of a source once."""
    return sum(map(sums, _blocks(0, length)), Sums())


def _stretch(order: Order, epoch: int, member: int | None, low: int, high: int) -> Sums:
    """The records at positions [low, high), less than an epoch."""
    places = (block % order.length for block in _blocks(low, high))
    return sum((sums(permuted(at, order.length, order.seed, epoch, member)) for at in places), Sums())


def promised(
    order: Order, epoch: int, member: int | None = None, *, start: int = 0, steps: int | None = None,
    shards: Sequence[int] = (), ways: int = 1,
) -> Sums:  # fmt: skip
    """What a member is to be given from step `start` to the end of an epoch.

    order: of its load. member: whose order it is, None where all members have the same. steps: steps of the
    epoch, where other loads of the phase set them; the load's own by default. shards, ways: where the load is
    split and a process holds some shards only: which, and how many there are.

    Whole epochs cost a sum over the records' numbers, once for each length; only what is left out at the end
    or given again has to be looked up in the order. Of a part of the shards every record has to be.
    """
    end = order.steps if steps is None else steps
    if ways > 1 and len(shards) < ways:
        return _shards(order, epoch, member, range(start, end), shards, ways)
    first = order.span(start)[0]
    last = order.span(end - 1)[0] + order.counted(end - 1) if end else 0
    if order.visit != "at_least_once":
        last = min(last, order.length)
    if last <= first:
        return Sums()
    if not first and last == order.length:
        return _all(order.length)
    if last <= order.length < 2 * (last - first):
        before = _stretch(order, epoch, member, 0, first)
        behind = _stretch(order, epoch, member, last, order.length)
        return _less(_all(order.length), before + behind, order)
    whole, rest = divmod(last - first, order.length)
    return _all(order.length).times(whole) + _stretch(order, epoch, member, first, first + rest)


def _less(whole: Sums, part: Sums, order: Order) -> Sums:
    """`whole` without `part`, which it holds; its extremes are those of the source."""
    total = (whole.total - part.total) & _MASK
    return Sums(whole.count - part.count, total, whole.plain - part.plain, 0, order.length - 1)


def _shards(
    order: Order, epoch: int, member: int | None, steps: range, shards: Sequence[int], ways: int
) -> Sums:
    total = Sums()
    for step in steps:
        ids, counted = order.records(epoch, step, member), order.counted(step)
        each = len(ids) // ways
        for shard in shards:
            total += sums(ids[shard * each : max(shard * each, min((shard + 1) * each, counted))])
    return total


@dataclass(frozen=True)
class Told:
    """Whose epoch it was, for the message. what: the source. member: its name and index in words, "" where
    all are alike. visit: the contract. span, file: the load's line."""

    what: str
    visit: str
    epoch: int
    member: str = ""
    span: Span | None = None
    file: str = ""


def check(tally: Tally, promise: Sums, context: Told, length: int) -> None:
    """Raise CP0763 where the records of an epoch were not those that were promised.

    length: records of the source. The message says how many are missing or too many, and names the record
    where one alone is.
    """
    if tally.sums.same(promise):
        return
    whose = f" for {context.member}" if context.member else ""
    message = f"epoch {context.epoch} of `{context.what}`{whose} was not visited {context.visit}"
    notes = (
        f"expected {_words(promise)}",
        f"found {_words(tally.sums)}" + (f", {tally.skipped} of them skipped" if tally.skipped else ""),
        *_culprit(tally.sums, promise, length),
        "what was trained on is not what the plan promises",
        "the length and the records of a source must not change while it is read",
    )
    raise CommplanError(
        Diagnostic("CP0763", message, context.span, tuple(Note(note) for note in notes), file=context.file)
    )


def _words(given: Sums) -> str:
    if not given.count:
        return "no records"
    return f"{given.count} records from {given.low} to {given.high}, checksum {given.total:016x}"


def _culprit(given: Sums, promise: Sums, length: int) -> tuple[str, ...]:
    """What is known of the records that are missing or too many."""
    more, gap = given.count - promise.count, given.plain - promise.plain
    mixed = (given.total - promise.total) & _MASK
    if given.high >= length:
        return (f"record {given.high} does not exist: the source has {length}",)
    if more == 1 and 0 <= gap < length and sums(np.array([gap])).total == mixed:
        return (f"record {gap} was given once too often",)
    if more == -1 and 0 <= -gap < length and -sums(np.array([-gap])).total & _MASK == mixed:
        return (f"record {-gap} is missing",)
    if more:
        return (f"{abs(more)} records {'too many' if more > 0 else 'are missing'}, at least",)
    swapped = _swapped(gap, mixed, length)
    if swapped is None:
        return ("some records are missing, and as many were given too often",)
    return (f"record {swapped} is missing, and record {swapped + gap} was given in its place",)


def _swapped(gap: int, mixed: int, length: int) -> int | None:
    """The record in whose place the one `gap` further on was given: their mixed ids differ by `mixed`."""
    low, high = max(0, -gap), min(length, length - gap)
    if high - low > _SEARCHED:
        return None
    for records in _blocks(low, high):
        gaps = mixed_array((records + gap).astype(np.uint64)) - mixed_array(records.astype(np.uint64))
        at = np.flatnonzero(gaps == np.uint64(mixed))
        if at.size:
            return int(records[at[0]])
    return None
