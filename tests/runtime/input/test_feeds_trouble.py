"""Feeds with a hanging function, too little memory or too few threads, or a badly timed collector."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import feed_process
import numpy as np
import pytest
from batch_feed import ours
from feed_members import Member, joined
from feed_process import text
from multirate_plans import code
from test_feeds_lifetime import saved_of, without_memory

from commplan.diagnostics import CommplanError
from commplan.recorder.blame import blame, described
from commplan.recorder.file import start_recording
from commplan.recorder.reading import read_records
from commplan.runtime.input.feeds import status
from commplan.runtime.input.observe import batch_record, wait_log
from commplan.runtime.input.ring import attachment, meeting, memory, producers
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.shm.slots import Slots

# pyright: reportPrivateUsage=false


@pytest.fixture
def hanging() -> Iterator[tuple[threading.Event, threading.Event]]:
    """`decode` hangs at record 13, of the first unit: it sets the first event, and the second one ends it."""
    hung, go_on = feed_process.HANG
    hung.clear()
    go_on.clear()
    feed_process.STATE["hangs"] = 13
    yield hung, go_on
    feed_process.STATE["hangs"] = -1
    go_on.set()


def makers_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"commplan-{name}-maker")]


def test_a_function_that_hangs_in_one_that_has_left_holds_nobody(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, hanging: tuple[threading.Event, threading.Event]
) -> None:
    hung, go_on = hanging
    monkeypatch.setattr(attachment, "_END_S", 0.05)
    feed = joined(feed_name)
    iter(feed)
    assert hung.wait(20)
    other = Member(feed_name, epochs=2, member=1, state=feed.state(), timeout=20.0)
    other.until("joined")
    makers = makers_of(feed_name)
    feed.close()
    other.finish()
    other.check_epochs(range(2))
    feed_process.STATE["hangs"] = -1
    with joined(feed_name) as again:  # while that thread still hangs
        assert len(list(again)) == 7
        assert any(thread.is_alive() for thread in makers)
        batches = [batch["labels"].copy() for batch in again]
        go_on.set()
        for thread in makers:
            thread.join(20)
        assert [len(labels) for labels in batches] == [4] * 7
        assert len(list(again)) == 7


def test_a_collector_waits_for_nobody(feed_name: str) -> None:
    """It may run in a thread that has the lock for which who joins waits."""
    forgotten, is_waiting, collected = joined(feed_name), threading.Event(), threading.Event()

    def join() -> None:
        with meeting.OPENING:
            is_waiting.set()
            assert collected.wait(20)

    thread = threading.Thread(target=join)
    thread.start()
    assert is_waiting.wait(20)
    iter(forgotten)
    del forgotten
    gc.collect()
    collected.set()
    thread.join(20)
    with joined(feed_name, member=0) as again:
        assert len(list(again)) == 7


def test_batches_that_cannot_be_kept_keep_the_member(feed_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = text().replace("mine           = map noise(pixels) per member", "").replace(" mine,", "")
    feed = joined(feed_name, plan)
    batch = next(feed)
    pixels = batch["pixels"].copy()
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "_exchange", without_memory)
        with pytest.raises(CommplanError) as error:
            feed.close()
        assert code(error) == "CP0923" and "batch in use" in str(error.value)
    assert len([next(feed) for _ in range(6)]) == 6
    np.testing.assert_array_equal(batch["pixels"], pixels)
    feed.close()
    np.testing.assert_array_equal(batch["pixels"], pixels)


@pytest.mark.parametrize("which", ["supervisor", "maker"])
def test_threads_that_cannot_be_started(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    refused, start = [True], threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if refused and thread.name.startswith(f"commplan-{feed_name}-{which}"):
            refused.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(producers, "MAINTENANCE_S", 0.01)
    monkeypatch.setattr(threading.Thread, "start", started)
    if which == "supervisor":
        with pytest.raises(CommplanError) as error:
            joined(feed_name)
        assert code(error) == "CP0928" and "can't start new thread" in str(error.value)
    with joined(feed_name, plan=text(hints="{ cores = 1 }")) as feed:  # a seat that is kept would hold it up
        assert len(list(feed)) == 7
    assert not refused and ("can be started" in caplog.text) == (which == "maker")


def test_who_makes_a_unit_is_not_who_has_its_place_now(
    feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(feed_name) as feed:
        next(feed)
        ring, lives = feed._ring, SharedMemory.lives
        slot = ring.memory.slots[0]
        unit = slot.get("unit") - 1
        slot.set(parts=ring.place + 1)
        assert ring.maker(unit) == os.getpid()
        assert not ring.maker(unit + ring.slot_count)

        def followed(self: SharedMemory, owner: int) -> bool:  # it dies as it is looked at
            slot.set(parts=0)
            return lives(self, owner)

        monkeypatch.setattr(SharedMemory, "lives", followed)
        assert not ring.maker(unit)


def test_a_stopped_process_that_holds_the_feed_is_named_and_holds_nobody_who_leaves(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "_LOCK_S", 600.0)
    monkeypatch.setattr(wait_log, "TELL_S", 0.1)
    hold = "import fcntl, os, signal, sys\nfile = os.open(sys.argv[1], os.O_RDWR)\n"
    hold += "fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)\nos.kill(os.getpid(), signal.SIGSTOP)"
    with joined(feed_name, timeout=0.5) as feed:
        path = f"/proc/{os.getpid()}/fd/{feed._ring.memory.descriptor}"
        process = subprocess.Popen([sys.executable, "-c", hold, path])
        try:
            assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(CommplanError) as error:
                for _ in range(3):
                    list(feed)
            feed.close()
        finally:
            process.kill()
            process.wait()
    assert code(error) == "CP0947"
    assert f"for process {process.pid}, which holds the shared memory: it is stopped" in str(error.value)
    assert f"for process {process.pid}, which holds the shared memory: it is stopped" in caplog.text


def test_a_wait_is_told_while_it_lasts(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the list of feeds, and in the record of a run that the process that waits belongs to."""
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    monkeypatch.setattr(batch_record, "TICK_S", 0.01)
    monkeypatch.setattr(batch_record, "_LASTS_S", 0.1)
    recording = start_recording("job", "another", 0, 1)
    assert recording is not None
    slow = Member(feed_name, epochs=1, stop_at=1, records=200)
    try:
        slow.until("saved")
        with joined(feed_name, count=200, state=saved_of(slow)) as fast:
            thread = threading.Thread(target=lambda: list(fast))
            thread.start()
            while not (calls := [r.call for r in read_records([str(tmp_path)]) if r.call is not None]):
                assert thread.is_alive()
            who = f"member 0 (process {slow.pid}), which is"
            assert calls[0].text.startswith(f"a wait of member 1 of feed {feed_name!r} for {who}")
            (rank,) = blame(read_records([str(tmp_path)])).ranks
            (activity,) = rank.activities
            assert activity.lane == "feed" and activity.waits is not None
            assert described(activity.waits).endswith(f" of feed {feed_name!r}")
            (listed,) = [feed for feed in status.feeds() if feed.name == feed_name]
            assert listed.members[1].waited_s > 0.1 and "member 0" in listed.members[1].waits_for
            slow.go_on()
            thread.join(20)
        slow.finish()
    finally:
        recording.remove()
    assert list(tmp_path.iterdir()) == []
    for thread in ours():  # the one that polls, which ends when nothing is left to poll
        thread.join(60)
    assert ours() == []


def test_members_that_begin_at_once_keep_one_record(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    records: list[batch_record.BatchRecord] = []
    both = threading.Barrier(2)

    class Slow(batch_record.BatchRecord):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            records.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # for the other member, should it come this far

    monkeypatch.setattr(batch_record, "BatchRecord", Slow)
    recording = start_recording("job", "another", 0, 1)
    assert recording is not None
    try:
        with joined(feed_name) as first, joined(feed_name) as second:
            threads = [threading.Thread(target=iter, args=(feed,)) for feed in (first, second)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
    finally:
        recording.remove()
    assert len(records) == 1


def test_a_feed_goes_into_the_record_of_the_run_that_is(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    with joined(feed_name) as feed:
        for job in ("first", "second"):
            recording = start_recording(job, "another", 0, 1)
            assert recording is not None
            list(feed)
            (lane,) = [record for record in read_records([str(tmp_path)]) if record.lane == "feed"]
            assert f"-{job}." in lane.path and lane.events
            recording.remove()
        assert len(list(feed)) == 7 and feed._attachment.recording.record is None
    assert list(tmp_path.iterdir()) == []


def test_a_source_whose_key_raises_is_named(feed_name: str) -> None:
    class Unkeyed(list[int]):
        @property
        def key(self) -> str:
            raise ValueError("no connection")

    with pytest.raises(CommplanError) as error:
        joined(feed_name, source=Unkeyed(range(26)))
    assert code(error) == "CP0902"
    assert "`key` of source `numbers` cannot be read: ValueError: no connection" in str(error.value)


def test_a_batch_may_be_more_units_than_are_kept_and_no_more_than_an_epoch(feed_name: str) -> None:
    with joined(feed_name, count=1000, batch=400) as feed:
        batches = list(feed)
    assert [len(batch["labels"]) for batch in batches] == [400] * 3
    assert sorted(set(np.concatenate([batch["labels"] for batch in batches]).tolist())) == list(range(1000))
    with pytest.raises(CommplanError) as error:
        joined(feed_name, batch=10**9)
    assert code(error) == "CP0931" and "more than an epoch, which has 28" in str(error.value)
