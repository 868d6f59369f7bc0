"""Members with independent clocks in one process: the bits of the member alone, and each record made once."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np
import pytest
from batch_feed import ours
from hypothesis import given, settings
from hypothesis import strategies as st
from input_plans import Counting, decode, images
from multirate_plans import ONCE, PLAIN, alone, code, in_turn, members, rates, same

from commplan.diagnostics import CommplanError
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.multirate.clocked import ClockedBatches

VISITS = (
    ONCE,
    f"{ONCE} tail short",
    "visit at_most_once seed 5 tail drop",
    "visit at_least_once seed 5",
    "visit at_most_once seed 9 tail short",
)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert ours() == []


@pytest.mark.parametrize("visit", VISITS)
@pytest.mark.parametrize("batches", [(4, 4, 8), (4, 6, 10), (8, 8), (3, 5)])
def test_each_member_gets_what_it_would_get_alone_in_any_order(visit: str, batches: tuple[int, ...]) -> None:
    program, order = rates(batches, visit), random.Random(f"{visit}{batches}")
    expected = [alone(program, m, 53) for m in range(len(batches))]
    refused = 0
    with members(program, images(53)) as feeds:
        for _ in range(2):
            for feed in (*feeds, *expected):
                iter(feed)
            live = set(range(len(batches)))
            while live:
                member = order.choice(sorted(live))
                try:
                    batch = next(feeds[member], None)
                except CommplanError as error:
                    assert error.diagnostics[0].code == "CP0946"
                    refused += 1
                    continue
                other = next(expected[member], None)
                assert (batch is None) == (other is None)
                if batch is None or other is None:
                    live.discard(member)
                else:
                    same(batch, other)
                    assert feeds[member].state() == expected[member].state()
        assert [f.state()["epoch"] for f in feeds] == [2] * len(batches)
    for feed in expected:
        feed.close()


@settings(max_examples=25)
@given(
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    length=st.integers(1, 40),
    visit=st.sampled_from([visit for visit in VISITS if "drop" not in visit]),
)
def test_any_batches_and_lengths(batches: list[int], length: int, visit: str) -> None:
    program = rates(batches, visit, body=PLAIN)
    expected = [alone(program, m, length) for m in range(len(batches))]
    with members(program, images(length)) as feeds:
        for _ in range(2):
            for feed in expected:
                iter(feed)
            in_turn(feeds, lambda member, batch: same(batch, next(expected[member])))
            assert [next(feed, None) for feed in expected] == [None] * len(batches)
    for feed in expected:
        feed.close()


def test_a_record_is_made_once_and_visited_once_by_everyone() -> None:
    program = rates((4, 4, 8), f"{ONCE} tail short")
    source, counts = Counting(images(53)), [Counter[int]() for _ in range(3)]

    def count(member: int, batch: HostBatch) -> None:
        (ids,) = batch.records.values()
        counts[member].update(ids.ravel().tolist())

    with members(program, source) as feeds:
        assert [feed.steps for feed in feeds] == [14, 14, 7]
        in_turn(feeds, count)
        assert sorted(source.read) == list(range(53))
        work = {line.what: line for line in feeds[0].summary().lines}
        assert work["map decode"].records == work["load images"].records == 53
        assert work["map flip"].records == 53
        assert [feed.summary().checked for feed in feeds] == [53] * 3
    assert counts == [Counter(range(53))] * 3


def test_where_the_passes_share_nothing_each_member_reads_for_itself() -> None:
    program = rates((4, 8), pipeline="share{design=none}")
    source = Counting(images(40))
    expected = [alone(program, m, 40) for m in range(2)]
    with members(program, source) as feeds:
        for m in (1, 0):  # in any order: no member waits for another
            for batch in feeds[m]:
                same(batch, next(expected[m]))
        assert Counter(source.read) == Counter(dict.fromkeys(range(40), 2))
    for feed in expected:
        feed.close()


def test_orders_of_their_own_are_not_shared() -> None:
    body = """
        raw = load images batch {batches} over member per member {rest}
        pixels, labels = map decode(raw)
        output pixels
    """
    program = rates((4, 8), body=body)
    expected = [alone(program, m, 24) for m in range(2)]
    with members(program, images(24)) as feeds:
        first = [list(feed) for feed in feeds]
    for m, batches in enumerate(first):
        for batch in batches:
            same(batch, next(expected[m]))
        expected[m].close()
    orders = [[i for b in batches for ids in b.records.values() for i in ids.ravel()] for batches in first]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(24))


@pytest.mark.parametrize("shards", [(0, 1), (3,), (1, 2)])
def test_a_process_takes_its_shards_of_a_batch(shards: tuple[int, ...]) -> None:
    program = rates((4, 4, 8), axes="axis data = 4")
    expected = [alone(program, m, 37, local={"data": shards}) for m in range(3)]
    with members(program, images(37), local={"data": shards}) as feeds:
        in_turn(feeds, lambda member, batch: same(batch, next(expected[member])))
    for feed in expected:
        feed.close()


@pytest.mark.parametrize("axes", ["", "axis data = 2"])
def test_skipped_records_leave_the_bits_of_the_member_alone(axes: str) -> None:
    program = rates((4, 4, 8), f"{ONCE} {{ on_error = skip }}", axes=axes)

    def broken(record: bytes) -> tuple[np.ndarray, int]:
        if record[0] in (3, 4, 17, 36):
            raise ValueError("truncated")
        return decode(record)

    expected = [alone(program, m, 37, functions={"decode": broken}) for m in range(3)]
    with members(program, images(37), functions={"decode": broken}) as feeds:
        in_turn(feeds, lambda member, batch: same(batch, next(expected[member])))
        counted = {line.what: line.skipped for line in feeds[2].summary().lines}
        assert counted["map decode"] == 4
    for feed in expected:
        feed.close()


def test_a_batch_of_one_unit_is_the_unit_itself_and_nobody_can_write_to_it() -> None:
    program = rates((4, 4, 8), body=PLAIN)
    with members(program, images(32)) as feeds:
        batches = [next(feed) for feed in feeds]
        pixels = [next(a for a in b.values.values() if a.shape[-2:] == (6, 6)) for b in batches]
        addresses = [array.__array_interface__["data"][0] for array in pixels]
        slots = [feed._cursor.slots for feed in feeds if isinstance(feed, ClockedBatches)]
        places = [each.offset(at) for each, at in zip(slots, addresses, strict=True)]
        assert places[0] == places[1] is not None and places[2] is None  # each maps the same slot
        with pytest.raises(ValueError, match="read-only"):
            pixels[0][...] = 0


def test_threads_may_drive_members() -> None:
    program = rates((2, 3, 8))
    expected = [alone(program, m, 101) for m in range(3)]
    wrong: list[BaseException] = []
    with members(program, Counting(images(101), delay=0.0002)) as feeds:

        def drive(member: int) -> None:
            try:
                for _ in range(2):
                    iter(expected[member])
                    for batch in feeds[member]:
                        same(batch, next(expected[member]))
                    assert next(expected[member], None) is None
            except BaseException as error:  # noqa: BLE001  for the test to see
                wrong.append(error)

        threads = [threading.Thread(target=drive, args=(m,)) for m in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert [feed.state()["epoch"] for feed in feeds] == [2, 2, 2]
    for alone_feed in expected:
        alone_feed.close()


def test_a_failing_record_is_told_to_every_member_at_its_own_batch() -> None:
    program = rates((4, 8), f"{ONCE} tail short")
    bad = 0

    def broken(record: bytes) -> tuple[np.ndarray, int]:
        if record[0] == bad:
            raise ValueError("truncated")
        return decode(record)

    where = [
        next(b.step for b in alone(program, m, 40) if bad in next(iter(b.records.values())).ravel())
        for m in (0, 1)
    ]
    with members(program, images(40), functions={"decode": broken}) as feeds:
        failed_at: dict[int, int] = {}
        for _ in range(20):
            for m, feed in enumerate(feeds):
                if m in failed_at or (m == 1 and feeds[0].state()["step"] % 2 and 0 not in failed_at):
                    continue
                try:
                    next(feed)
                except CommplanError as error:
                    assert error.diagnostics[0].code == "CP0906"
                    assert f"record {bad}" in error.diagnostics[0].message
                    failed_at[m] = feed.state()["step"]
        assert failed_at == {0: where[0], 1: where[1]}
        with pytest.raises(CommplanError) as error:
            next(feeds[0])
        assert code(error) == "CP0916"


def test_places_are_integers_and_hold_for_a_member_alone_too() -> None:
    program = rates((4, 4, 8))
    with members(program, images(53)) as feeds:
        for m, steps in ((1, 3), (2, 2), (0, 5)):
            for _ in range(steps):
                next(feeds[m])
        states = [feed.state() for feed in feeds]
    assert [(s["epoch"], s["step"]) for s in states] == [(0, 5), (0, 3), (0, 2)]
    expected = [alone(program, m, 53, state=states[m]) for m in range(3)]
    source = Counting(images(53))
    with members(program, source, states=states) as feeds:
        in_turn(feeds, lambda member, batch: same(batch, next(expected[member])))
        assert [feed.state()["epoch"] for feed in feeds] == [1, 1, 1]
        assert len(source.read) == 56 - 12  # from the one that was furthest behind
    for alone_feed in expected:
        alone_feed.close()
    with pytest.raises(CommplanError) as error, members(program, images(53), states=[states[2]] * 3):
        pass
    assert code(error) == "CP0910"
