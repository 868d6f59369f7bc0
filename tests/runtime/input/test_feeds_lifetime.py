"""Members of feeds that leave, fail, are collected, die or are slow, and the errors of the others."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import feed_process
import pytest
from feed_members import FUNCTIONS, Member, joined
from feed_process import decode, noise
from multirate_plans import code

from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input.feeds import status
from commplan.runtime.input.feeds.feed import Feed
from commplan.runtime.input.ring import attachment, meeting, producers
from commplan.runtime.input.ring.claims import Claim
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.shm.slots import Slots

HANGING = """
import sys, threading
from feed_members import FUNCTIONS, joined

calls, begun = [], threading.Event()

def noise(pixels, rng):
    if "-own" in threading.current_thread().name:
        calls.append(pixels)
        if len(calls) > 4:  # the first batch is complete
            begun.set()
            threading.Event().wait()
    return pixels

feed = joined(sys.argv[1], functions={**FUNCTIONS, "noise": noise})
threading.Thread(target=lambda: list(feed), daemon=True).start()
assert begun.wait(60)
"""


def test_the_interpreter_ends_while_private_work_of_a_member_hangs(feed_name: str) -> None:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", HANGING, feed_name], check=True, timeout=60, env=path)


def without_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_member_that_is_closed_waits_no_longer(feed_name: str) -> None:
    with joined(feed_name, count=200) as first, joined(feed_name, count=200) as second:
        codes: list[str] = []

        def drive() -> None:
            with pytest.raises(CommplanError) as error:
                list(first)
            codes.append(code(error))

        next(second)
        thread = threading.Thread(target=drive)
        thread.start()
        while thread.is_alive() and not first._ring.cursors[0].get("wanted"):
            thread.join(0.01)
        first.close()
        thread.join(20)
        assert codes == ["CP0916"]
        assert len(list(second)) == 49


def test_who_joins_again_waits_for_what_its_threads_still_make(
    feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They close the file at their end, and the kernel lets go of all locks of the process then: where
    there is no memory for them to go on in."""
    begun, go_on = threading.Event(), threading.Event()

    def held(number: Any) -> Any:
        begun.set()
        go_on.wait()
        return decode(number)

    functions = {"decode": held, "noise": noise}
    monkeypatch.setattr(attachment, "_END_S", 0.05)
    first = joined(feed_name, functions=functions)
    iter(first)
    assert begun.wait(20)
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "detach", without_memory)
        first.close()
    assert feed_name not in [feed.name for feed in status.feeds()]
    monkeypatch.setattr(meeting, "MEET_S", 0.5)  # other programs of this machine may join feeds meanwhile
    with pytest.raises(CommplanError) as error:
        joined(feed_name, functions=functions)
    assert code(error) == "CP0928" and "this process has left feed" in str(error.value)
    monkeypatch.setattr(meeting, "MEET_S", 20.0)
    go_on.set()
    with joined(feed_name, functions=functions) as again:
        assert again.state()["epoch"] == 0 and len(list(again)) == 7


def test_a_member_that_is_forgotten_leaves_while_another_comes(
    feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = joined(feed_name)
    enter = Feed._enter_ring  # pyright: ignore[reportPrivateUsage]

    def entered(feed: Feed, *arguments: Any) -> None:
        enter(feed, *arguments)
        first.close()

    monkeypatch.setattr(Feed, "_enter_ring", entered)
    with joined(feed_name) as second:
        assert len(list(second)) == 7


def test_threads_go_on_where_a_process_holds_the_feed_for_long(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, claims, claim = threading.Semaphore(0), [1], Ring.claim

    def look() -> None:
        looks.release()
        fail("CP0921", "held")

    def claimed(ring: Ring) -> Claim | None:
        if claims:
            claims.pop()
            fail("CP0921", "process 7 holds it")
        return claim(ring)

    monkeypatch.setattr(producers, "MAINTENANCE_S", 0.01)
    monkeypatch.setattr(Ring, "claim", claimed)
    with joined(feed_name) as feed:
        feed._attachment.looks[99] = look
        assert len(list(feed)) == 7
        assert looks.acquire(timeout=20) and looks.acquire(timeout=20)
    assert "process 7 holds it" in caplog.text


def test_a_feed_that_is_forgotten_holds_nobody(feed_name: str) -> None:
    with joined(feed_name) as feed:
        forgotten = joined(feed_name)
        next(iter(forgotten))
        dead = weakref.ref(forgotten)
        del forgotten
        deadline = time.monotonic() + 20
        while dead() is not None and time.monotonic() < deadline:  # a thread may hold it for a moment
            gc.collect()
        assert len(list(feed)) == 7


def test_members_come_die_and_come_back(feed_name: str) -> None:
    """The one that makes units is killed inside its function; the others make its unit anew."""
    first = Member(feed_name, epochs=9, die_at=34, stop_at=0)
    second = Member(feed_name, epochs=5, wait=True, pace=0.01)
    assert first.until("joined") == 0
    first.until("saved")
    second.go_on()
    assert second.until("joined") == 1
    for _ in range(9):
        first.go_on()
    first.finish(-signal.SIGKILL)
    third = Member(feed_name, epochs=1, member=0)
    third.until("joined")
    for member in (second, third):
        member.finish()
    begun = second.batches[0]["epoch"]
    second.check_epochs(range(begun, begun + 5))
    third.check_epochs(range(third.batches[0]["epoch"], third.batches[0]["epoch"] + 1))
    sums: dict[tuple[int, int], Any] = {}
    for batch in (*first.batches, *second.batches, *third.batches):
        shared = {key: batch["sums"][key] for key in ("pixels", "labels")}
        assert sums.setdefault((batch["epoch"], batch["step"]), shared) == shared


def test_the_slow_one_is_named_and_nothing_is_left_of_any(feed_name: str) -> None:
    slow = Member(feed_name, epochs=1, stop_at=1, records=200)
    assert slow.until("joined") == 0
    slow.until("saved")
    fast = Member(
        feed_name, epochs=1, member=5, state={**saved_of(slow), "step": 2}, records=200, timeout=1.5
    )
    errors = fast.finish(1)
    assert f"member 5 of feed {feed_name!r} has waited" in errors
    assert f"for member 0 (process {slow.pid})" in errors and "records behind" in errors
    assert "CP0947" in errors
    slow.kill()
    assert list(meeting.memory_files(feed_name)) == []


def saved_of(member: Member) -> dict[str, int]:
    return next(line["saved"] for line in member.lines if "saved" in line)


def test_a_lock_that_is_taken_twice_is_held_to_the_end(feed_name: str) -> None:
    look = "import os, sys; from commplan.runtime.input.shm.locks import is_locked\n"
    look += "print(is_locked(os.open(sys.argv[1], os.O_RDWR), 0))"
    with joined(feed_name) as feed:
        memory = feed._ring.memory
        path = f"/proc/{os.getpid()}/fd/{memory.descriptor}"
        with memory.locked():
            with memory.locked():
                pass
            result = subprocess.run(
                [sys.executable, "-c", look, path], capture_output=True, text=True, check=True
            )
        assert result.stdout == "True\n"


def test_the_last_member_may_leave_while_a_unit_is_claimed(
    feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(feed_name) as feed:
        ring = feed._ring
        monkeypatch.setattr(ring, "least", lambda: 0)
        ring.cursors[0].set(state=0)
        assert ring.claim() is None


def test_a_record_that_fails_is_told_to_all(feed_name: str) -> None:
    feed_process.STATE["bad"] = 22
    try:
        with joined(feed_name) as first, joined(feed_name) as second:
            for feed in (first, second):
                with pytest.raises(CommplanError) as error:
                    list(feed)
                assert "truncated" in str(error.value) and "record 22" in str(error.value)
    finally:
        feed_process.STATE["bad"] = -1


@pytest.mark.parametrize("error_type", [SystemExit, KeyboardInterrupt])
def test_a_function_that_would_end_the_process_is_told_to_all(
    feed_name: str, error_type: type[BaseException]
) -> None:
    def leaving(number: Any) -> Any:
        if number == 22:
            raise error_type(3)
        return decode(number)

    functions = {**FUNCTIONS, "decode": leaving}
    with joined(feed_name, functions=functions) as first, joined(feed_name, functions=functions) as second:
        for feed in (first, second):
            with pytest.raises(CommplanError) as error:
                list(feed)
            assert code(error) == "CP0920" and f"{error_type.__name__}: 3" in str(error.value)


def test_a_folder_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with that name of another user does not prevent joining."""
    monkeypatch.setattr(meeting, "default_folder", lambda: tmp_path)
    squatted = tmp_path / f"commplan-feeds-{os.getuid()}"
    squatted.mkdir(0o755)
    with meeting.exclusive():
        (folder,) = set(tmp_path.iterdir()) - {squatted}
        assert folder.name == f"{squatted.name}.1" and folder.stat().st_mode & 0o077 == 0
    assert set(tmp_path.iterdir()) == {squatted}
    monkeypatch.setattr(meeting, "default_folder", lambda: tmp_path / "gone")
    with pytest.raises(CommplanError) as error, meeting.exclusive():
        pass
    assert code(error) == "CP0928" and "No such file or directory" in str(error.value)
