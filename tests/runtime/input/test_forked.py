"""Processes that are forked from one with batches, and threads that ask for batches at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_feed import batches, no_thread_is_left_behind
from input_plans import Counting, ensemble, images
from multirate_plans import members, rates
from support import interpreter

from commplan.diagnostics import CommplanError

SCRIPT = Path(__file__).with_name("input_process.py")
pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def forked(does: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Whether `does` returns true in a process forked from this one; false if it does not end. This process
    calls `meanwhile`."""
    with warnings.catch_warnings():
        # That there are threads is the point; JAX warns of it where another test has imported it.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        child = os.fork()
    if child == 0:
        answer = 1
        try:
            answer = 0 if does() else 1
        finally:
            os._exit(answer)
    meanwhile()
    until = time.monotonic() + 20
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return False
        time.sleep(0.01)


def _together(take: Callable[[], None]) -> None:
    threads = [threading.Thread(target=take, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "the end of the epoch is the end for all"


@forks
def test_a_forked_process_is_told_that_batches_are_not_its_own() -> None:
    with batches(ensemble("", 1), images(80)) as feed:
        next(feed)

        def asks() -> bool:
            try:
                next(feed)
            except CommplanError as error:
                return error.diagnostics[0].code == "CP0916"
            return False

        assert forked(asks)
        assert [batch.step for batch in feed] == list(range(1, 10))


@forks
def test_a_forked_process_closes_without_waiting_for_threads_that_it_has_not() -> None:
    with batches(ensemble("", 1), images(80)) as feed:
        next(feed)
        is_held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with feed._window._lock:
                is_held.set()
                done.wait()

        other = threading.Thread(target=hold)
        other.start()
        is_held.wait()

        def closes() -> bool:
            feed.close()
            return True

        ended = forked(closes)
        done.set()
        other.join()
        assert ended
        assert [batch.step for batch in feed] == list(range(1, 10))


@forks
def test_a_batch_of_a_forked_process_does_not_change_when_its_slot_is_reused() -> None:
    with batches(ensemble("", 1), images(160)) as feed:
        batch = next(feed)
        before = {ref: array.tobytes() for ref, array in batch.values.items()}
        is_reused, reuse = os.pipe()
        os.set_blocking(is_reused, False)

        def is_unchanged() -> bool:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    return bool(os.read(is_reused, 1)) and before == {
                        ref: array.tobytes() for ref, array in batch.values.items()
                    }
                time.sleep(0.01)
            return False

        def advance() -> None:
            nonlocal batch
            del batch
            for _ in range(8):
                next(feed)
            os.write(reuse, b"x")

        assert forked(is_unchanged, advance)
        os.close(is_reused)
        os.close(reuse)


def test_batches_that_another_thread_closes_during_a_wait_keep_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with batches(ensemble("", 1), images(80)) as feed:
        exchange = feed._window.exchange
        assert exchange is not None
        take = exchange.take

        def closed(number: int) -> tuple[Any, Sequence[int]]:
            unit = take(number)
            other = threading.Thread(target=feed.close)
            other.start()
            other.join()
            return unit

        monkeypatch.setattr(exchange, "take", closed)
        with contextlib.suppress(CommplanError):  # the batch, or CP0916
            assert next(feed).step == 0


@forks
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_forked_process_does_with_shared_batches_is_not_seen(when: str) -> None:
    """It drops a batch that its parent still holds, and closes."""
    run = f"test-{uuid.uuid4().hex[:12]}"
    processes = [
        subprocess.Popen(
            [
                *interpreter.words(jax=False),
                str(SCRIPT),
                json.dumps({"run": run, "index": index, "count": 2, "design": "all_shared", "records": 200,
                            "forks": when if index == 0 else None}),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    reports = [
        [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        for process in processes
    ]
    steps = [[line["step"] for line in lines if "step" in line] for lines in reports]
    assert steps == [list(range(25))] * 2, reports
    assert [line["changed"] for line in reports[0] if "changed" in line] == [False]


def test_threads_that_ask_at_the_same_time_get_each_batch_once() -> None:
    steps: list[int] = []
    with batches(ensemble("", 1), Counting(images(200), delay=0.0005)) as feed:
        iter(feed)

        def take() -> None:
            while (batch := next(feed, None)) is not None:
                steps.append(batch.step)

        _together(take)
    assert sorted(steps) == list(range(25))


def test_threads_that_ask_for_one_member_get_each_batch_once() -> None:
    steps: list[int] = []
    with members(rates([4, 8]), Counting(images(80), delay=0.0005)) as feeds:
        feeds[1].close()
        iter(feeds[0])

        def take() -> None:
            while (batch := next(feeds[0], None)) is not None:
                steps.append(batch.step)

        _together(take)
    assert sorted(steps) == list(range(20))


@forks
def test_a_forked_process_has_no_members_either() -> None:
    with members(rates([4, 8]), images(80)) as feeds:
        feeds[1].close()
        next(feeds[0])

        def asks_and_closes() -> bool:
            with pytest.raises(CommplanError) as error:
                next(feeds[0])
            feeds[0].close()
            return error.value.diagnostics[0].code == "CP0916"

        assert forked(asks_and_closes)
        assert [batch.step for batch in feeds[0]] == list(range(1, 20))
