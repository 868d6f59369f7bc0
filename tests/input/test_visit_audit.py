"""The run-time check of a visit: correct epochs pass, mistakes are found, and named if possible."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.diagnostics import CommplanError, Span
from commplan.input.order import Order
from commplan.input.visit_audit import EpochContext, EpochTally, RecordSums, check, expected_sums, sums

TOLD = EpochContext("images", "exactly_once", 3, "member 2", Span(7, 1, 7, 9), "a.plan")
orders = st.builds(
    Order,
    length=st.integers(1, 90),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    visit=st.sampled_from(["exactly_once", "at_least_once", "at_most_once"]),
    tail=st.sampled_from(["pad", "short", "drop"]),
)


def given_ids(order: Order, epoch: int, member: int | None, steps: range) -> list[int]:
    """The ids that count, straight from the order, step by step."""
    indices: list[int] = []
    for step in steps:
        indices += order.records(epoch, step, member)[: order.counted(step)].tolist()
    return indices


@settings(max_examples=300)
@given(order=orders, epoch=st.integers(0, 5), member=st.none() | st.integers(0, 3), data=st.data())
def test_the_promise_is_what_the_order_gives(
    order: Order, epoch: int, member: int | None, data: st.DataObject
) -> None:
    """Whatever the visit, the tail, the step it begins with, and the steps of the epoch."""
    steps = data.draw(st.none() | st.integers(0, 8)) if order.visit != "exactly_once" else None
    end = order.steps if steps is None else steps
    start = data.draw(st.integers(0, end))
    ids = np.array(given_ids(order, epoch, member, range(start, end)), np.int64)
    assert expected_sums(order, epoch, member, start=start, steps=steps).same(sums(ids))
    assert expected_sums(order, epoch, member, start=start, steps=steps).plain == ids.sum()


@settings(max_examples=100)
@given(order=orders, ways=st.integers(1, 4), data=st.data())
def test_shards_add_up_to_the_whole(order: Order, ways: int, data: st.DataObject) -> None:
    if order.tail == "short" or order.batch % ways:
        return
    parts = [expected_sums(order, 1, shards=(shard,), ways=ways) for shard in range(ways)]
    whole = RecordSums()
    for part in parts:
        whole += part
    assert whole.same(expected_sums(order, 1))


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 10**9), max_size=40), data=st.data())
def test_sums_do_not_know_the_order_nor_the_batches(ids: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(ids))
    cut = data.draw(st.integers(0, len(ids)))
    tally = EpochTally()
    tally.add(np.array(shuffled[:cut], np.int64))
    tally.add(np.array(shuffled[cut:], np.int64))
    assert tally.sums == sums(np.array(ids, np.int64))


@settings(max_examples=200)
@given(order=orders, data=st.data())
def test_any_other_multiset_is_refused(order: Order, data: st.DataObject) -> None:
    ids = given_ids(order, 0, None, range(order.steps))
    other = data.draw(st.lists(st.integers(0, order.length - 1), min_size=len(ids), max_size=len(ids)))
    other = data.draw(st.sampled_from([other, ids[1:], [*ids, ids[0]] if ids else [0]]))
    tally = EpochTally()
    tally.add(np.array(other, np.int64))
    promise = expected_sums(order, 0)
    if Counter(other) == Counter(ids):
        check(tally, promise, TOLD, order.length)
        return
    with pytest.raises(CommplanError) as caught:
        check(tally, promise, TOLD, order.length)
    assert caught.value.diagnostics[0].code == "CP0763"


def refusal(ids: list[int], length: int = 100, batch: int = 8) -> str:
    tally = EpochTally()
    tally.add(np.array(ids, np.int64))
    with pytest.raises(CommplanError) as caught:
        check(tally, expected_sums(Order(length, batch, 5), 3), TOLD, length)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.span == TOLD.span
    assert diagnostic.file == "a.plan"
    assert diagnostic.message == "epoch 3 of `images` for member 2 was not visited exactly_once"
    return "\n".join(note.text for note in diagnostic.notes)


def test_one_missing_record_is_named() -> None:
    assert "record 37 is missing" in refusal([i for i in range(100) if i != 37])


def test_one_double_record_is_named() -> None:
    assert "record 0 was visited once too often" in refusal([*range(100), 0])


def test_one_record_in_place_of_another_is_named() -> None:
    assert "record 12 is missing, and record 80 was visited instead" in refusal(
        [80 if i == 12 else i for i in range(100)]
    )
    assert "record 80 is missing, and record 12 was visited instead" in refusal(
        [12 if i == 80 else i for i in range(100)]
    )


def test_a_record_that_does_not_exist_is_named() -> None:
    assert "record 100 does not exist: the source has 100" in refusal([*range(99), 100])


def test_many_mistakes_are_counted() -> None:
    assert "at least 40 records are missing" in refusal(list(range(60)))
    assert "at least 1 record is missing" in refusal([*range(98), 3])
    assert "at least 2 records are too many" in refusal([*range(100), 3, 4])
    assert "at least 1 record is too many" in refusal([*range(99), 3, 4])
    assert "as many were visited too often" in refusal([*range(97), 1, 2, 3])
    assert "found no records" in refusal([])


def test_skipped_records_are_told() -> None:
    tally = EpochTally()
    tally.add(np.arange(99), skipped=2)
    with pytest.raises(CommplanError, match="2 of them skipped"):
        check(tally, expected_sums(Order(100, 8, 5), 3), TOLD, 100)


def test_a_large_epoch_is_summed_in_blocks() -> None:
    """More records than a block, with a dropped tail in the middle of the numbers."""
    order = Order(200_003, 1000, 9, "at_most_once", "drop")
    tally = EpochTally()
    for step in range(order.steps):
        tally.add(order.records(2, step))
    assert tally.sums.count == 200_000
    check(tally, expected_sums(order, 2), TOLD, order.length)
    assert not tally.sums.same(expected_sums(order, 1))
