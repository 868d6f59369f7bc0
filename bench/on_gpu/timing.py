"""Times of calls that are taken in turns, on devices that work while the host goes on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from commplan.lowering.jax.typing_shim import jax

Call = Callable[[], Any]


class Scale(msgspec.Struct, frozen=True):
    """How large a part measures: `small` without a GPU, where nothing follows from times."""

    small: bool
    rounds: int

    def pick(self, small: int, large: int) -> int:
        return small if self.small else large


def scale_of(rounds: int) -> Scale:
    """What this process's devices are good for."""
    small = jax.devices()[0].platform == "cpu"
    return Scale(small, min(rounds, 3) if small else rounds)


def in_turns(calls: Mapping[str, Call], rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Seconds of each call by its name, one entry a round; each round begins with another call.

    What a call returns is waited for, after `repeat` calls in a row. All are called once before.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    order = list(calls)
    for number in range(rounds):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            start = time.perf_counter()
            results = [calls[name]() for _ in range(repeat)]
            jax.block_until_ready(results)
            took[name].append((time.perf_counter() - start) / repeat)
    return took


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> str:
    """`3.21 ms (3.19 to 3.40)`."""
    low, high = min(times) * 1e3, max(times) * 1e3
    return f"{median(times) * 1e3:.3f} ms ({low:.3f} to {high:.3f})"
