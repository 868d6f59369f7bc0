"""Clocks of several machines on one time scale, from the collectives that their ranks had in common.

A rank cannot end what depends on another before that one has begun: with times t of machines A and B, and o
what is added to each, `t_end + o_A >= t_begin + o_B`, so `o_B - o_A <= t_end - t_begin`. Over all collectives
the least of these differences bounds `o_B - o_A` from above, and that of the other direction from below.
Bounds combine along paths (shortest paths; a negative cycle is a contradiction). The offset is the middle of
what is left, and half its width the uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_TOLERANCE_S = 1e-6  # of the clocks' own rounding
Bounds = npt.NDArray[np.float64]


class Clock(NamedTuple):
    """offset: seconds added to times of a machine, so that they are those of the first. lower, upper: between
    which it lies for certain; infinite where no collective says so."""

    host: str
    offset: float
    lower: float
    upper: float

    @property
    def uncertainty(self) -> float:
        """Seconds by which the offset may be wrong."""
        return (self.upper - self.lower) / 2


def bounds(machines: Sequence[int], begins: Sequence[float], ends: Sequence[float], count: int) -> Bounds:
    """What a collective says in which every rank depends on every other: `[a, b]` is the most by which the
    offset of machine b exceeds that of a. machines: by rank, its number, below `count`."""
    last, first = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(last, machines, begins)
    np.minimum.at(first, machines, ends)
    return first[:, None] - last[None, :]


def aligned(hosts: Sequence[str], constraints: Sequence[Bounds]) -> tuple[list[Clock], int]:
    """The clocks of machines, and how many of the constraints, the latest ones, they obey.

    Clocks that run at different rates contradict themselves in the long run: then the earlier half is left
    out, until what is left fits. With none left the offsets are 0, and unbounded.
    """
    count, used = len(hosts), len(constraints)
    while used:
        most: Bounds = np.array(constraints[len(constraints) - used :]).min(axis=0)
        np.fill_diagonal(most, 0.0)
        for via in range(count):
            most = np.minimum(most, most[:, [via]] + most[[via], :])
        if np.diagonal(most).min() >= -_TOLERANCE_S:
            return [_clock(host, -most[i, 0], most[0, i]) for i, host in enumerate(hosts)], used
        used //= 2
    return [_clock(host, *((0.0, 0.0) if i == 0 else (-np.inf, np.inf))) for i, host in enumerate(hosts)], 0


def _clock(host: str, lower: float, upper: float) -> Clock:
    middle = (lower + upper) / 2 if np.isfinite(upper - lower) else 0.0
    return Clock(host, float(np.clip(middle, lower, upper)), float(lower), float(upper))
