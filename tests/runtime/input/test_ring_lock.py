"""The lock of a ring: processes that hold it for long, interruptions, and the threads that wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import ring_process
from ring_process import SHAPE
from rings import UNITS, joined, stopped_in_lock

from commplan.diagnostics import CommplanError, fail
from commplan.input.work_partition import division
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.ring import memory as ring_memory
from commplan.runtime.input.ring import producers as ring_producers
from commplan.runtime.input.ring.carriage import Carriage
from commplan.runtime.input.ring.claims import Blocker, Claim
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.producers import Producers, Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import Units
from commplan.runtime.input.ring.words import ABSENT, LIVES, RING_LOCK
from commplan.runtime.input.shm import futex
from commplan.runtime.input.transport.transport import Carrier, RegroupedError

# pyright: reportPrivateUsage=false


def test_a_process_that_is_stopped_in_the_lock_is_named(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_memory, "_LOCK_S", 0.1)
    with stopped_in_lock(memory) as pid:
        with pytest.raises(CommplanError) as error, memory.locked():
            pass
        assert error.value.diagnostics[0].code == "CP0921" and str(pid) in str(error.value)
        assert Ring(memory).blocker(0) == Blocker("lock", pid)


class Interruption:
    """A trace function: Ctrl-C at line event `number` of the code that locks.

    Not in `__del__`, where Python prints an exception instead of raising it, nor at line `excepted`.
    """

    def __init__(self, number: int, excepted: int) -> None:
        self.number, self.excepted = number, excepted

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interruption | None:
        name, is_memory = frame.f_code.co_filename, frame.f_code.co_filename == ring_memory.__file__
        if not (is_memory or name == contextlib.__file__) or frame.f_code.co_name == "__del__":
            return None
        if event == "line" and not (is_memory and frame.f_lineno == self.excepted):
            self.number -= 1
            if self.number == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
def test_an_interruption_at_any_line_releases_the_lock(memory: SharedMemory, is_kept: bool) -> None:
    """Its traceback may be kept, except if the interruption occurs on entry of `__exit__`."""
    code = ring_memory.Hold.__exit__.__code__
    entry = next(line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno)
    other = os.open(
        f"/proc/self/fd/{memory.descriptor}", os.O_RDWR
    )  # closing it releases locks, as in `memory`
    query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, RING_LOCK, 1, 0)
    errors, number, is_over = list[BaseException](), 0, False
    while not is_over:
        number += 1
        interruption = Interruption(number, entry if is_kept else -1)
        sys.settrace(interruption)
        try:
            with memory.locked():
                pass
        except KeyboardInterrupt as error:
            errors += [error] * is_kept
        finally:
            sys.settrace(None)
        assert is_free(memory), number
        assert struct.unpack("hhqqi", fcntl.fcntl(other, fcntl.F_OFD_GETLK, query))[0] == fcntl.F_UNLCK, (
            number
        )
        is_over = interruption.number > 0
    os.close(other)
    assert number > 10


def is_free(memory: SharedMemory) -> bool:
    """Whether another thread can acquire the lock at once."""
    results: list[bool] = []

    def attempt() -> None:
        results.append(memory._lock.acquire(timeout=0.01))
        if results[0]:
            memory._lock.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_that_stops_waiting_for_the_lock_releases_it(memory: SharedMemory) -> None:
    """A process that is stopped holds the lock of the file, and two threads of this process wait for it."""
    ended: list[threading.Thread] = []

    def wait() -> None:
        with pytest.raises(ClosedError), memory.locked():
            pass
        ended.append(threading.current_thread())

    with stopped_in_lock(memory):
        threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        memory.is_stopped = True
        for thread in threads:
            thread.join(20)
    assert sorted(ended, key=id) == sorted(threads, key=id)


@pytest.mark.parametrize("step", ["reap", "begin_carry", "deal_here", "end_carry"])
def test_transfers_continue_after_a_process_held_the_lock(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """The first `step` of a transfer fails, as if a stopped process held the lock."""
    ring, failures, calls = joined(memory), iter(range(1)), list[str]()
    carriage = carriage_in(ring, by_caller=False)
    regroupings = iter([RegroupedError(0, division("all_shared", (0, 1)))] if step == "deal_here" else [])

    def locking(name: str) -> Callable[..., bool]:
        def change(*_: object) -> bool:
            if name == step and next(failures, None) is not None:
                fail("CP0921", "process 1 has held the lock")
            calls.append(name)
            memory.is_stopped = name == "end_carry"
            return True

        return change

    def move(*_: object) -> None:
        if (error := next(regroupings, None)) is not None:
            raise error

    for name in ("reap", "begin_carry", "deal_here", "end_carry"):
        monkeypatch.setattr(ring, name, locking(name))
    monkeypatch.setattr(ring, "is_whole", lambda unit: unit == 0)
    monkeypatch.setattr(carriage, "elect", lambda: True)
    monkeypatch.setattr(carriage, "move", move)
    carriage.run(functools.partial(carriage.advance, 0))
    assert carriage.failure is None and step in calls
    assert ring.cursors[0].get("position") == 1 and len(caplog.records) == 1


def test_a_caller_that_moves_a_unit_raises_the_error_of_the_lock(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    carriage = carriage_in(joined(memory), by_caller=True)
    monkeypatch.setattr(carriage, "move", lambda *_: None)
    monkeypatch.setattr(ring_memory, "_LOCK_S", 0.1)
    with stopped_in_lock(memory), pytest.raises(CommplanError) as error:
        carriage.attempt(0)
    assert error.value.diagnostics[0].code == "CP0921"


def carriage_in(ring: Ring, *, by_caller: bool) -> Carriage:
    carrier = cast("Carrier", SimpleNamespace(by_caller=by_caller))
    return Carriage(ring, cast("Units", None), ring.memory.mapped_slots(), carrier, 0)


def test_a_maker_that_cannot_lock_the_ring_is_replaced(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first claim of each maker fails, as if a stopped process held the lock."""
    memory.header.set(cores=1)
    ring = joined(memory)
    monkeypatch.setattr(ring_producers, "MAINTENANCE_S", 0.01)
    claim, failures = ring.claim, iter(range(3))

    def fail_first() -> Claim | None:
        if next(failures, None) is not None:
            fail("CP0921", "process 1 has held the lock")
        return claim()

    monkeypatch.setattr(ring, "claim", fail_first)
    producers = made_by(ring)
    producers.start()
    ring.arm(0, UNITS)
    await_true(lambda: ring.is_made(0))
    await_true(lambda: len(caplog.records) == 3)  # the last one is logged after its maker is replaced
    ring.retire()
    producers.join(5.0)


def test_threads_of_a_process_continue_while_one_of_them_waits_for_the_lock(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maker that has made its part waits for the lock of the ring, which another process holds."""
    ring, waits = joined(memory), threading.Event()
    producers = made_by(ring)

    def wait(*_: object, **__: object) -> None:
        waits.set()
        while not memory.is_stopped:
            time.sleep(0.001)
        raise ClosedError

    monkeypatch.setattr(ring, "next_claim", wait)
    producers.start()
    ring.arm(0, UNITS)
    assert waits.wait(20)
    is_free = producers._lock.acquire(timeout=5)
    ring.retire()
    assert is_free
    producers._lock.release()
    producers.join(5.0)


def test_a_process_whose_makers_cannot_be_started_raises_the_error(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring, start = joined(memory), threading.Thread.start
    producers = made_by(ring)

    def refuse_makers(thread: threading.Thread) -> None:
        if "-maker-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(ring_producers, "MAINTENANCE_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_makers)
        producers.start()
        ring.arm(0, UNITS)
        await_true(lambda: len(caplog.records) > 1)
        with pytest.raises(CommplanError) as error:
            producers.check()
        assert error.value.diagnostics[0].code == "CP0928"
        memory.header.set(process_places=2)
        memory.processes[1].set(order=2, state=LIVES)
        producers.check()  # another process makes the units
        memory.processes[1].set(state=ABSENT)
    await_true(lambda: ring.is_made(0))
    producers.check()
    ring.retire()
    producers.join(5.0)


def test_a_process_is_marked_as_idle_while_a_maker_waits(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One maker claims the last part after another has found none, and before that one waits."""
    ring, marks, waits = joined(memory), list[tuple[bool, bool]](), threading.Semaphore(0)
    producers, mark, wait = made_by(ring), ring.mark_idle, futex.wait

    def marked(is_idle: bool) -> None:
        marks.append((producers._lock.locked(), is_idle == (producers._waiting > 0)))
        mark(is_idle)

    def waited(bell: Any, value: int, seconds: float) -> None:
        waits.release()
        wait(bell, value, seconds)

    monkeypatch.setattr(ring, "mark_idle", marked)
    monkeypatch.setattr(futex, "wait", waited)
    producers.start()
    ring.arm(0, UNITS)
    await_true(lambda: ring.is_made(SHAPE.slots - 1))
    for _ in range(4):
        assert waits.acquire(timeout=20)
    ring.retire()
    producers.join(5.0)
    assert marks and set(marks) == {(True, True)}


def made_by(ring: Ring) -> Producers:
    units, slots = cast("Units", ring_process.Numbers()), ring.memory.mapped_slots()
    return Producers(ring, units, slots, "numbers", Recording(), ring.leave, lambda: None)


def await_true(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_file_closed_by_another_thread_ends_waits(memory: SharedMemory) -> None:
    joined(memory)
    os.close(memory.descriptor)  # `SharedMemory.close` then sets `descriptor`
    with pytest.raises(ClosedError):
        memory.lives(1)
    with pytest.raises(ClosedError):
        memory.lock_holder()
    memory.descriptor = -1
    with pytest.raises(ClosedError):
        memory.lives(1)


def test_a_supervisor_that_is_stopped_before_it_waits_does_not_wait(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is stopped, and the bell rung, before the supervisor reads the bell."""
    waits: list[float] = []

    class StoppingBell:
        @property
        def value(self) -> int:
            memory.is_stopped = True
            return 1

    ring, units = joined(memory), cast("Units", ring_process.Numbers())
    producers = Producers(
        ring, units, memory.mapped_slots(), "numbers", Recording(), lambda: None, lambda: None
    )
    monkeypatch.setattr(memory, "bell", lambda name: StoppingBell())
    monkeypatch.setattr(futex, "wait", lambda bell, value, seconds: waits.append(seconds))
    producers._supervise()
    assert waits == []


def test_threads_that_start_at_the_same_time_are_all_joined(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second thread is started while the first has not begun to run."""
    units, is_over, start = cast("Units", ring_process.Numbers()), threading.Event(), threading.Thread.start
    producers = Producers(
        joined(memory), units, memory.mapped_slots(), "numbers", Recording(), lambda: None, lambda: None
    )
    other = threading.Thread(target=lambda: producers.begin(is_over.wait, "second"))

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "numbers-first":
            start(other)
            other.join(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    producers.begin(is_over.wait, "first")
    other.join()
    assert sorted(thread.name for thread in producers.running) == ["numbers-first", "numbers-second"]
    is_over.set()
    producers.join(5.0)
