"""Ctrl-C while batches are made: no lock stays held, and no thread waits for a record that hangs."""

from __future__ import annotations

import contextlib
import errno
import gc
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from input_plans import FUNCTIONS, decode, ensemble, images
from multirate_plans import members, rates
from ring_process import SHAPE

from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input import iterator
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.cursor import Cursor
from commplan.runtime.input.ring.memory import SharedMemory


def test_an_interrupted_wait_is_not_waited_for_again():
    gate, begun = threading.Event(), threading.Event()
    giving_up = threading.Timer(30, gate.set)  # so that a mistake fails and does not hang
    giving_up.daemon = True
    giving_up.start()

    def hanging(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        begun.set()
        gate.wait()
        return decode(record)

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    functions = {**FUNCTIONS, "decode": hanging}
    made = PhaseBatches(ensemble("", 1), "step", {"images": images(32)}, functions)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        next(made)
    made.close()
    still = not gate.is_set()
    giving_up.cancel()
    gate.set()
    assert still


class Interrupting:
    """A trace function: Ctrl-C once at every line of the pipeline's code, except during the return after all
    work is done, and while another Ctrl-C is being handled."""

    FILES = (
        "iterator.py",
        "input/window.py",
        "host_batch.py",
        "unit_batches.py",
        "batch_builder.py",
        "multirate/member.py",
        "multirate/clocked.py",
        "visit_check.py",
        "shm/slots.py",
        "ring/cursor.py",
        "ring/exchange.py",
        "ring/producers.py",
    )

    def __init__(self, files: tuple[str, ...] = FILES) -> None:
        self.files = files
        self.done: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if "runtime/input/" not in name or not name.endswith(self.files) or _is_atomic(frame):
            return None
        place = (name, frame.f_lineno)
        tidying = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if tidying or linecache.getline(*place).strip() == "return item":
            return self
        if event == "line" and place not in self.done:
            self.done.add(place)
            raise KeyboardInterrupt
        return self


def _is_atomic(frame: FrameType | None) -> bool:
    """Whether no interruption is raised there.

    Python prints the exceptions of callbacks of weak references, and it handles no signal between the last
    statement of `CompletionCounter.add` and the release of its lock.
    """
    names: list[str] = []
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[0] == "CompletionCounter.add" or not {"Slots._dead", "_unmap"}.isdisjoint(names)


def driven(feed: Iterator[HostBatch], ctrl_c: Interrupting) -> HostBatch | None:
    """The next batch, however often it takes."""
    while True:
        sys.settrace(ctrl_c)
        try:
            return next(feed)
        except KeyboardInterrupt:
            continue
        except StopIteration:
            return None
        finally:
            sys.settrace(None)


def ids(batch: HostBatch) -> list[int]:
    return next(iter(batch.records.values())).ravel().tolist()


def test_no_batch_is_lost_by_an_interruption() -> None:
    ctrl_c = Interrupting()
    with PhaseBatches(ensemble("", 1), "step", {"images": images(320)}, FUNCTIONS) as feed:
        seen = [record for batch in iter(lambda: driven(feed, ctrl_c), None) for record in ids(batch)]
        assert feed.state()["epoch"] == 1
    assert sorted(seen) == list(range(320)) and len(ctrl_c.done) > 30


def test_an_interruption_does_not_move_rows_twice() -> None:
    def failing(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        if record[0] % 3 == 1:
            raise ValueError("bad")
        return decode(record)

    functions = {**FUNCTIONS, "decode": failing}
    plan = ensemble("", 1, hints="{ on_error = skip }")
    names = {binding.value: binding.name for binding in plan.phase("step").outputs}

    def contents(batch: HostBatch) -> dict[str, bytes]:
        arrays = {names[ref]: array for ref, array in batch.values.items()}
        return {name: array.tobytes() for name, array in arrays.items()} | {"ids": bytes(ids(batch))}

    def batches(ctrl_c: Interrupting) -> list[dict[str, bytes]]:
        with PhaseBatches(plan, "step", {"images": images(128)}, functions) as feed:
            return [contents(batch) for batch in iter(lambda: driven(feed, ctrl_c), None)]

    ctrl_c, never = Interrupting(), Interrupting(files=())
    assert batches(ctrl_c) == batches(never) and len(ctrl_c.done) > 150


def test_no_thread_is_waited_for_that_an_interruption_kept_from_beginning() -> None:
    before, ctrl_c = rings(), Interrupting(files=("ring/exchange.py", "ring/producers.py"))
    with PhaseBatches(ensemble("", 1), "step", {"images": images(160)}, FUNCTIONS) as feed:
        records = [record for batch in iter(lambda: driven(feed, ctrl_c), None) for record in ids(batch)]
    assert records == in_order(160) and len(ctrl_c.done) > 25
    assert rings() == before, "the memory is closed although threads were started in several attempts"


def rings() -> list[int]:
    """The bytes of each open memory file of a ring of this process alone."""
    files = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return [file.stat().st_size for file in files if "/memfd:commplan-own" in str(file.readlink())]


def test_batches_allocate_no_slots_before_the_first_request() -> None:
    before = rings()
    program = ensemble("", 1)
    with PhaseBatches(program, "step", {"images": images(64)}, FUNCTIONS) as feed:
        exchange = feed._window.exchange
        assert exchange is not None
        assert sum(rings()) - sum(before) == exchange.ring.memory.shape.data_at
    assert rings() == before


@pytest.mark.parametrize("place", ["Checks", "start"])
def test_no_memory_file_stays_open_after_a_failed_start(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """An interruption before the iterator is complete, and a system without threads."""
    before = rings()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, CommplanError)):
        if place == "start":
            patched.setattr(threading.Thread, place, refused)
        else:
            patched.setattr(iterator, place, interrupted)
        with PhaseBatches(ensemble("", 1), "step", {"images": images(64)}, FUNCTIONS) as feed:
            next(feed)
    gc.collect()
    assert rings() == before


def test_a_ring_is_left_if_arrays_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Cursor) -> None:
        fail("CP0923", "no memory")

    before = rings()
    feed = PhaseBatches(ensemble("", 1), "step", {"images": images(64)}, FUNCTIONS)
    next(feed)
    monkeypatch.setattr(Cursor, "recall", refused)
    with pytest.raises(CommplanError):
        feed.close()
    deadline = time.monotonic() + 10
    while rings() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the last thread closes the file
    assert rings() == before


@pytest.mark.parametrize("is_forked", [False, True])
def test_memory_that_is_collected_closes_no_other_file(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its file has been closed and is in use again; or a forked process collects it."""
    memory = meeting.created("test-ring", "the ring", SHAPE, {})
    descriptor, copy = memory.descriptor, os.dup(memory.descriptor)
    if is_forked:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    else:
        other = os.open(os.devnull, os.O_RDONLY)
        os.dup2(other, descriptor)
        os.close(other)
    del memory
    gc.collect()
    os.close(descriptor)  # raises OSError if it is closed
    os.close(copy)


@pytest.mark.parametrize("failure", [OSError(errno.ENOMEM, "Cannot allocate memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["_records", "lay_out"])
def test_a_ring_that_cannot_be_created_leaves_no_open_file(
    failure: BaseException, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise failure

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(SharedMemory, method, failing)
    with pytest.raises((CommplanError, KeyboardInterrupt)) as error:
        meeting.created("test-ring", "the ring", SHAPE, {})
    assert isinstance(error.value, KeyboardInterrupt) or "CP0923" in str(error.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_ring_that_cannot_be_read_is_closed_once(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = meeting.created("test-ring", "the ring", SHAPE, {})
    candidate = meeting.MemoryFile("test-ring", memory.key, f"/proc/self/fd/{memory.descriptor}")
    closed: list[int] = []
    close = os.close

    def failing(_: SharedMemory) -> None:
        raise failure

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(meeting, "is_locked", lambda *_: True)
        patched.setattr(SharedMemory, "facts", failing)
        patched.setattr(os, "close", lambda number: (closed.append(number), close(number)))
        assert meeting.opened(candidate, "the ring") is None
        gc.collect()
    gc.collect()
    assert len(closed) == 1
    memory.close()


def test_no_batch_that_was_taken_ahead_is_lost_by_an_interruption() -> None:
    ctrl_c = Interrupting()
    plan = ensemble("", 1, hints="{ device_prefetch = 2 }")
    with PhaseBatches(plan, "step", {"images": images(320)}, FUNCTIONS) as feed:
        taken = iter(lambda: feed.take(lambda batch: batch, feed.on_devices), None)
        seen = [record for batch in iter(lambda: driven(taken, ctrl_c), None) for record in ids(batch)]
        assert feed.state()["epoch"] == 1
    assert seen == in_order(320) and len(ctrl_c.done) > 40


def in_order(count: int) -> list[int]:
    with PhaseBatches(ensemble("", 1), "step", {"images": images(count)}, FUNCTIONS) as feed:
        return [record for batch in feed for record in ids(batch)]


def test_no_unit_is_lost_by_an_interruption() -> None:
    ctrl_c = Interrupting()
    with members(rates((4, 8)), images(320)) as feeds:
        for feed in feeds:
            iter(feed)
        seen: list[list[int]] = [[], []]
        for step in range(80):
            for member in (0, 1) if step % 2 == 0 else (0,):
                batch = driven(feeds[member], ctrl_c)
                assert batch is not None
                seen[member] += ids(batch)
    assert [sorted(one) for one in seen] == [list(range(320))] * 2 and len(ctrl_c.done) > 60
