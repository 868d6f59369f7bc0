"""Repetitions: whose turn it is, and how far they differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(items: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """The order of the items in each round: every round begins with another one."""
    for number in range(rounds):
        first = number % max(1, len(items))
        yield [*items[first:], *items[:first]]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, middle, high = quartiles(values)
    return (high - low) / 2 / middle
