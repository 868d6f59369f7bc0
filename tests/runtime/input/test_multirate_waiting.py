"""Members with independent clocks that wait for each other: the bounds, the messages, and no hangs."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

import pytest
from batch_feed import ours
from input_plans import FUNCTIONS, Counting, images
from multirate_plans import ONCE, PLAIN, alone, code, in_turn, members, rates, same

from commplan.diagnostics import CommplanError
from commplan.runtime.input.multirate.clocked import ClockedPhase, SharingOptions, member_batches
from commplan.runtime.input.multirate.schedule import clock_plan
from commplan.runtime.input.observe import wait_log
from commplan.runtime.input.ring import waiting


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    gc.collect()
    until = time.monotonic() + 20
    while ours() and time.monotonic() < until:
        time.sleep(0.01)
    assert ours() == []


def background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def soon(happened: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30
    while not happened() and time.monotonic() < until:
        time.sleep(0.005)
    return happened()


def test_a_fast_member_waits_within_the_bound_and_the_slow_one_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "TELL_S", 0.05)
    caplog.set_level(logging.WARNING, logger="commplan.input")
    program = rates((4, 8), body=PLAIN)
    lead = clock_plan(program, "step").rates.bound
    counts, most = [0, 0], 0
    with members(program, images(400)) as feeds:
        iter(feeds[1])

        def fast() -> None:
            nonlocal most
            for _ in feeds[0]:
                counts[0] += 4
                most = max(most, counts[0] - counts[1])

        thread = background(fast)
        assert soon(lambda: counts[0] == lead)  # member 1 has taken nothing
        assert soon(lambda: bool(caplog.records))
        assert thread.is_alive() and counts[0] == lead
        message = caplog.records[0].getMessage()
        assert (
            "member 0 of `member`" in message
            and "member 1" in message
            and f"{lead} records behind" in message
        )
        for batch in feeds[1]:
            counts[1] += 8
            assert batch.step < 50
        thread.join(30)
        assert counts == [400, 400]
        assert most <= lead + 8  # the test hears of a batch after the stream does
        slow = feeds[0].summary().slow
        assert slow is not None and slow.member == 1 and slow.wait_s > 0.05


def test_one_thread_is_told_whom_to_drive_and_can_go_on() -> None:
    program = rates((4, 4, 8), body=PLAIN)
    expected = [alone(program, m, 96) for m in range(3)]
    with members(program, images(96)) as feeds:
        count = 0
        with pytest.raises(CommplanError) as error:
            for batch in feeds[0]:
                same(batch, next(expected[0]))
                count += 1
        assert code(error) == "CP0946"
        rates_ = clock_plan(program, "step").rates
        assert count == rates_.bound // 4
        text = str(error.value)
        assert "would wait for member 1, which the same thread drives" in text
        assert f"{count * 4} records behind" in text and f"{rates_.bound} records are kept" in text
        assert "tested.plan" in text
        for m in (2, 1):
            same(next(feeds[m]), next(expected[m]))
        same(next(feeds[0]), next(expected[0]))
        feeds[1].close()
        feeds[2].close()
        for batch in feeds[0]:  # closed ones hold nobody back
            same(batch, next(expected[0]))
        assert feeds[0].state()["epoch"] == 1
    for feed in expected:
        feed.close()


def test_a_member_that_nobody_drives_any_more_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "UNDRIVEN_S", 0.1)
    program = rates((4, 8), body=PLAIN)
    with alone(program, 1, 400) as other:
        first = next(other)
    with members(program, images(400)) as feeds:
        background(lambda: same(next(feeds[1]), first)).join()
        with pytest.raises(CommplanError) as error:
            for _ in feeds[0]:
                pass
        assert code(error) == "CP0947"
        assert "no thread drives it" in str(error.value)


def test_a_living_member_is_waited_for_as_long_as_was_said() -> None:
    program = rates((4, 8), body=PLAIN)
    end = threading.Event()
    with members(program, images(400), options=SharingOptions(timeout=0.1)) as feeds:
        began = threading.Event()

        def slow() -> None:
            next(feeds[1])
            began.set()
            end.wait(30)

        thread = background(slow)
        began.wait(30)
        with pytest.raises(CommplanError) as error:
            for _ in feeds[0]:
                pass
        end.set()
        thread.join()
        assert code(error) == "CP0947"
        assert "it is alive" in str(error.value)


def test_who_has_finished_an_epoch_holds_nobody_and_may_come_back() -> None:
    """Member 0 goes on for two more epochs; member 1 then reads the past records alone, and misses none."""
    program = rates((4, 8))
    expected = [alone(program, m, 61) for m in range(2)]
    source = Counting(images(61))

    def seen(member: int, batch: object) -> None:
        same(batch, next(expected[member]))  # type: ignore[arg-type]

    with members(program, source) as feeds:
        in_turn(feeds, seen)
        assert len(source.read) == 64
        for _ in range(2):
            iter(expected[0])
            for batch in feeds[0]:
                same(batch, next(expected[0]))
        assert len(source.read) == 3 * 64
        for _ in range(2):
            iter(expected[1])
            for batch in feeds[1]:
                same(batch, next(expected[1]))
        for alone_feed in expected:
            iter(alone_feed)
        in_turn(feeds, seen)  # together again
        assert [feed.state()["epoch"] for feed in feeds] == [4, 4] or feeds[1].state()["epoch"] == 4
        work = {line.what: line.records for line in feeds[1].summary().lines}
        assert work["map decode"] >= 5 * 64
    for alone_feed in expected:
        alone_feed.close()


def test_who_comes_late_misses_nothing_and_is_waited_for() -> None:
    program = rates((4, 8), body=PLAIN)
    plan = clock_plan(program, "step")
    hub = ClockedPhase(plan, {"images": images(200)}, FUNCTIONS)
    late = alone(program, 1, 200)
    with member_batches(hub, 0) as first:
        for _ in range(20):
            next(first)
        with member_batches(hub, 1) as second:
            with pytest.raises(CommplanError) as error:
                list(first)  # what is made already it gets
            assert code(error) == "CP0946" and "records behind" in str(error.value)
            for batch in second:
                same(batch, next(late))
                while first.state()["step"] * 4 < second.state()["step"] * 8:
                    next(first)
            work = {line.what: line.records for line in second.summary().lines}
            assert work["map decode"] < 200 + 120  # together again after the first few batches
    late.close()


def test_a_forgotten_member_holds_nobody() -> None:
    program = rates((4, 8), body=PLAIN)
    hub = ClockedPhase(clock_plan(program, "step"), {"images": images(200)}, FUNCTIONS)
    first, second = member_batches(hub, 0), member_batches(hub, 1)
    next(second)
    next(first)
    del second
    gc.collect()
    assert sum(1 for _ in first) == 49
    again = member_batches(hub, 1, state=None)
    assert next(again).step == 0
    del first, again
    gc.collect()


def test_one_iterator_for_a_member_at_a_time() -> None:
    program = rates((4, 8), body=PLAIN)
    hub = ClockedPhase(clock_plan(program, "step"), {"images": images(20)}, FUNCTIONS)
    with member_batches(hub, 0), pytest.raises(CommplanError) as error:
        member_batches(hub, 0)
    assert code(error) == "CP0948"
    with member_batches(hub, 0) as feed:
        assert next(feed).step == 0


def test_loads_of_one_phase_have_one_clock() -> None:
    body = """
        raw   = load images batch {batches} over member {rest}
        other = load images batch {more} visit exactly_once seed 6
        pixels, labels = map decode(raw)
        twins, names = map decode(other)
        output pixels, twins
    """
    apart = rates((4, 8), body=body.replace("{more}", "[4, 4] over member"))
    with pytest.raises(CommplanError) as error:
        clock_plan(apart, "step")
    assert code(error) == "CP0945"
    assert "[4, 8]" in str(error.value) and "[4, 4]" in str(error.value)
    program = rates((4, 8), body=body.replace("{more}", "[4, 8] over member"))
    expected = [alone(program, m, 24) for m in range(2)]
    with members(program, images(24)) as feeds:
        in_turn(feeds, lambda member, batch: same(batch, next(expected[member])))
    for feed in expected:
        feed.close()


def test_a_load_that_ends_otherwise_is_refused() -> None:
    program = rates((4, 8), ONCE.replace("exactly_once", "at_most_once") + " tail drop")
    with pytest.raises(CommplanError) as error, members(program, images(6)):
        pass
    assert code(error) == "CP0903"
