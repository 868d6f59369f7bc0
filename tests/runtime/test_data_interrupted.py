"""Ctrl-C while batches are made: nothing is left locked, and nobody waits for a record that hangs."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from commplan.runtime.data.ring import Ring, Task


class One:
    """A batch of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def first(self) -> Sequence[Task]:
        return ()

    def publish(self, error: BaseException | None) -> None:
        raise AssertionError(error)

    def second(self) -> Sequence[Task]:
        return (self.task,)

    def finish(self) -> str:
        return "made"


def ring(task: Task = lambda: None) -> Ring[str]:
    return Ring(lambda number: One(task), depth=2, threads=2, name="interrupted")


def interrupting(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
    """A trace function: Ctrl-C where a condition has been entered, before `with` knows of it."""
    if frame.f_code is not threading.Condition.__enter__.__code__ or frame.f_back is None:
        return None
    if not frame.f_back.f_code.co_filename.endswith("ring.py"):
        return None

    def inside(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "return":
            raise KeyboardInterrupt
        return inside

    return inside


def test_an_interruption_leaves_no_lock_behind():
    made = ring()
    before = sys.gettrace()
    sys.settrace(interrupting)
    try:
        made.take()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    seen: list[bool] = []

    def elsewhere() -> None:
        seen.append(made._lock.acquire(timeout=5))
        if seen[0]:
            made._lock.release()

    other = threading.Thread(target=elsewhere)
    other.start()
    other.join()
    made.close()
    assert seen == [True]


def test_an_interrupted_wait_is_not_waited_for_again():
    gate, begun = threading.Event(), threading.Event()
    giving_up = threading.Timer(30, gate.set)  # so that a mistake fails and does not hang
    giving_up.daemon = True
    giving_up.start()

    def hanging() -> None:
        begun.set()
        gate.wait()

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    made = ring(hanging)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        made.take()
    made.close()
    still = not gate.is_set()
    giving_up.cancel()
    gate.set()
    assert still
