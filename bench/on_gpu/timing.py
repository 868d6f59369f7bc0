"""Times of calls that are made in turns, on devices that compute while the host continues."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from bench.harness.spread import turns

Call = Callable[[], Any]
Seconds = dict[str, list[float]]


def wait(results: Any) -> None:
    """Wait for every array of a pytree but those that a later call has taken as donated arguments."""
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(results) if not _is_deleted(leaf)])


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def in_turns(
    calls: Mapping[str, Call], rounds: int, repeat: int = 4, progress: Callable[[Seconds], None] | None = None
) -> Seconds:
    """Time each call by its name, in rounds that each begin with another call.

    Args:
        calls: functions without arguments that return pytrees of arrays. Each is called once before the clock
            starts. A call may donate the arrays that its last call returned.
        rounds: how often every call is timed.
        repeat: calls in a row for one time. The arrays are waited for after the last.
        progress: called with all times so far, after each first call and after every round.

    Returns:
        Seconds of one call, by name, one entry a round.
    """
    times: Seconds = {}
    for name, call in calls.items():
        wait(call())
        times[name] = []
        if progress:
            progress(times)
    for order in turns(list(calls), rounds):
        for name in order:
            start = time.perf_counter()
            wait([calls[name]() for _ in range(repeat)])
            times[name].append((time.perf_counter() - start) / repeat)
        if progress:
            progress(times)
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> str:
    """`3.213 ms (3.190 to 3.400)`: the median, the least and the most of `times` in seconds."""
    low, high = min(times) * 1e3, max(times) * 1e3
    return f"{median(times) * 1e3:.3f} ms ({low:.3f} to {high:.3f})"
