"""Threads for the stages that each process runs itself: their end, and errors of their tasks."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from batch_feed import batches
from input_plans import ensemble, images

from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.stages.stage_threads import StageThreads
from commplan.runtime.input.window import BatchWindow
from commplan.wait import result_of

HANGING = """
import threading
from commplan.runtime.input.stages.stage_threads import StageThreads

threads, begun = StageThreads(1, "hanging"), threading.Event()
threads.submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
threads.close()
"""


def test_the_interpreter_ends_while_a_task_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)


def test_tasks_run_in_order_in_at_most_as_many_threads() -> None:
    threads, numbers = StageThreads(1, "ordered"), []
    for future in [threads.submit(lambda number=number: numbers.append(number)) for number in range(20)]:
        result_of(future)
    assert numbers == [*range(20)] and len(threads.running) == 1
    with pytest.raises(ZeroDivisionError):
        result_of(threads.submit(lambda: 1 // 0))
    threads.close()


def test_tasks_that_have_not_begun_fail_if_the_threads_are_closed() -> None:
    threads, begun, gate = StageThreads(2, "closed"), threading.Barrier(3), threading.Event()
    busy = [threads.submit(lambda: (begun.wait(), gate.wait())) for _ in range(2)]
    late = threads.submit(lambda: None)
    begun.wait()
    threads.close()
    with pytest.raises(ClosedError):
        result_of(late)
    gate.set()
    assert [result_of(future) for future in busy] == [None, None]
    with pytest.raises(ClosedError):
        threads.submit(lambda: None)
    for thread in threads.running:
        thread.join(60)
        assert not thread.is_alive()


def test_a_cancelled_task_is_passed_over() -> None:
    threads, begun, gate = StageThreads(1, "cancelled"), threading.Event(), threading.Event()
    threads.submit(lambda: (begun.set(), gate.wait()))
    cancelled, following = threads.submit(lambda: 1 // 0), threads.submit(lambda: None)
    begun.wait()
    assert cancelled.cancel()
    gate.set()
    assert result_of(following) is None and cancelled.cancelled()
    begun.clear()
    gate.clear()
    threads.submit(lambda: (begun.set(), gate.wait()))
    begun.wait()
    threads.submit(lambda: None).cancel()
    threads.close()
    gate.set()
    threads.running[0].join(60)
    assert not threads.running[0].is_alive()


def test_an_error_of_the_next_batch_does_not_withhold_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchWindow, "_uses_stage_threads", True)
    with batches(ensemble("", 1), images(32)) as feed:
        exchange = feed._window.exchange
        assert exchange is not None
        feed._window.unit_batches = None  # as if stages of this process followed
        readable = exchange.readable

        def failing(number: int) -> None:
            if number == 1:
                raise KeyError(number)
            readable(number)
            readable(number + 1)  # so that it can begin

        monkeypatch.setattr(exchange, "readable", failing)
        assert next(feed).step == 0
        with pytest.raises(KeyError):
            next(feed)
