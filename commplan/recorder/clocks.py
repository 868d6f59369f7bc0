"""Aligns the clocks of several machines, from the collectives that their ranks had in common.

A rank cannot end a collective that depends on another rank before that rank has begun it. Let t be times on
machines A and B, and o the offsets that are added to them. Then `t_end + o_A >= t_begin + o_B`, so
`o_B - o_A <= t_end - t_begin`. The least of these differences over all collectives bounds `o_B - o_A` from
above, and the same for the other direction bounds it from below. Bounds combine along paths (shortest paths;
a negative cycle is a contradiction). The offset is the middle of the remaining interval, and the uncertainty
half its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_TOLERANCE_S = 1e-6  # rounding of the clocks
Bounds = npt.NDArray[np.float64]  # [machines, machines] in seconds, see `bounds`


class Clock(NamedTuple):
    """The clock of a machine.

    Attributes:
        host: The name of its host.
        offset: Seconds to add to its times to get times of the first machine.
        lower, upper: Bounds of the offset in seconds; infinite if no collective bounds it on this side.
    """

    host: str
    offset: float
    lower: float
    upper: float

    @property
    def uncertainty(self) -> float:
        """Half the distance of the bounds in seconds; infinite if one of them is."""
        return (self.upper - self.lower) / 2


def bounds(machines: Sequence[int], begins: Sequence[float], ends: Sequence[float], count: int) -> Bounds:
    """The bounds from a collective that makes every rank depend on every other.

    Args:
        machines: The number of each rank's machine, below `count`.
        begins, ends: The times of each rank in seconds, on the clock of its machine.
        count: The number of machines.

    Returns:
        A matrix [count, count]: the offset of machine b exceeds that of machine a by at most `[a, b]`
        seconds. Infinite if either machine has no rank in the collective.
    """
    last, first = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(last, machines, begins)
    np.minimum.at(first, machines, ends)
    return first[:, None] - last[None, :]


def aligned(hosts: Sequence[str], constraints: Sequence[Bounds]) -> tuple[list[Clock], int]:
    """Find offsets of clocks that satisfy as many of the latest constraints as possible.

    Constraints over a long time contradict each other if clocks run at different rates. In this case the
    earlier half is dropped, repeatedly, until the others are consistent.

    Args:
        hosts: The host of each machine, at least one.
        constraints: Results of `bounds` for these machines, in order of time.

    Returns:
        The clock of each machine, and the number of the latest constraints that they satisfy. A machine that
        no constraint links to the first one has an unbounded offset of 0. If the number is 0, this holds for
        all machines except the first.
    """
    count, used = len(hosts), len(constraints)
    while used:
        most: Bounds = np.array(constraints[len(constraints) - used :]).min(axis=0)
        np.fill_diagonal(most, 0.0)
        for via in range(count):  # shortest paths, by the algorithm of Floyd and Warshall
            most = np.minimum(most, most[:, [via]] + most[[via], :])
        if np.diagonal(most).min() >= -_TOLERANCE_S:
            return [_clock(host, -most[i, 0], most[0, i]) for i, host in enumerate(hosts)], used
        used //= 2
    return [_clock(host, *((0.0, 0.0) if i == 0 else (-np.inf, np.inf))) for i, host in enumerate(hosts)], 0


def _clock(host: str, lower: float, upper: float) -> Clock:
    """The clock with these bounds. If one is infinite, the offset is the allowed value nearest to 0."""
    middle = (lower + upper) / 2 if np.isfinite(upper - lower) else 0.0
    return Clock(host, float(np.clip(middle, lower, upper)), float(lower), float(upper))
