"""Measure the share of a function's time that holds the interpreter's lock and cannot overlap in threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2  # The number of concurrent threads.
ROUNDS = 5  # The number of measurements of each function. The median counts.
_LONGEST_ROUND_S = 0.2  # The most seconds of one measurement.
# Linux counts here, in nanoseconds, for how long the calling thread has computed and waited for a CPU.
_SCHEDULED = Path("/proc/thread-self/schedstat")

Calls = list[tuple[Callable[..., Any], tuple[Any, ...], bool]]
"""Calls: a function, its operands, and whether it is random and takes `rng` as a keyword."""


def lock_shares_of(calls_of: Mapping[str, Calls], seconds: float) -> dict[str, float]:
    """The share of each function's time that holds the interpreter's lock.

    The same calls run in k threads at once. A thread computes, or waits for a CPU (which the kernel counts
    separately), or sleeps while it waits for the lock. If z is the sleeping part, k threads do s = k (1 - z)
    times the work of one, and the share is (k/s - 1)/(k - 1): Amdahl's law (1967), solved for the serial
    part.

    Args:
        calls_of: Calls of each function, at least one.
        seconds: About how long to measure.

    Returns:
        The median share of several rounds, from 0 to 1, by function. It is 1 for functions that fail in
        threads. Functions are left out if the kernel does not count waiting threads.
    """
    shares: dict[str, float] = {}
    round_s = min(_LONGEST_ROUND_S, seconds / max(1, len(calls_of) * ROUNDS))
    interval_s = sys.getswitchinterval()
    # A thread that waits for the lock then sleeps until its release and never waits for a CPU.
    sys.setswitchinterval(1.0)
    try:
        for name, calls in calls_of.items():
            asleep = [part for _ in range(ROUNDS) if (part := _asleep(calls, round_s)) is not None]
            if asleep:
                speedup = max(1.0, THREADS * (1 - float(np.median(asleep))))
                shares[name] = round((THREADS / speedup - 1) / (THREADS - 1), 3)
    finally:
        sys.setswitchinterval(interval_s)
    return shares


def _asleep(calls: Calls, seconds: float) -> float | None:
    """The part of their time in which concurrent threads neither compute nor wait for a CPU.

    1 if a call fails; None if the kernel does not count.
    """
    started: list[float] = []
    gate = threading.Barrier(THREADS, lambda: started.append(time.perf_counter()))
    busy: list[float] = []
    problems: list[Exception] = []

    def run(thread: int) -> None:
        rng, number = np.random.default_rng(thread), thread
        before = _scheduled_s()
        gate.wait()
        try:
            while time.perf_counter() - started[0] < seconds:
                function, operands, is_random = calls[number % len(calls)]
                function(*operands, **({"rng": rng} if is_random else {}))
                number += THREADS
        except Exception as error:  # noqa: BLE001  Some functions do not support threads.
            problems.append(error)
        after = _scheduled_s()
        if before is not None and after is not None:
            busy.append(after - before)

    workers = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        return 1.0
    whole = THREADS * (time.perf_counter() - started[0])
    return max(0.0, 1 - sum(busy) / whole) if len(busy) == THREADS else None


def _scheduled_s() -> float | None:
    """The seconds that this thread has computed or waited for a CPU; None if the kernel does not count."""
    try:
        computed, waited, _ = _SCHEDULED.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return (int(computed) + int(waited)) / 1e9
