"""Reports of long waits on the logger `commplan.input`, at growing intervals; and the exception that ends a
wait."""

from __future__ import annotations

import time
from collections import deque

TELL_S = 5.0  # a wait is reported after this time, and again each time its duration has doubled
PATIENCE_S = 1800.0  # the timeout for live but silent peers: includes compilation and start-up
START_S = 30.0  # the first report of a wait for peers that start, which takes different times
USUAL_S, _MEDIANS, _INTERVALS = 10.0, 5.0, 16


def log_warning(message: str, *arguments: object) -> None:
    """Log a warning on the logger `commplan.input`. Few processes have one, so `logging` is loaded here."""
    import logging  # noqa: PLC0415

    logging.getLogger("commplan.input").warning(message, *arguments, stacklevel=2)


class ClosedError(Exception):
    """The batches were closed during a wait."""


class WaitReporter:
    """Times the reports of one wait.

    Args:
        first: Seconds before the first report; TELL_S if None.
    """

    def __init__(self, first: float | None = None) -> None:
        self._next = TELL_S if first is None else first

    def due(self, waited: float) -> bool:
        """Whether a wait that has lasted for `waited` seconds must be reported now."""
        if waited <= self._next:
            return False
        self._next *= 2
        return True


class Cadence:
    """The intervals between batches."""

    def __init__(self) -> None:
        self._last = 0.0
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def came(self) -> None:
        """Record that a batch has arrived now."""
        last, self._last = self._last, time.monotonic()
        if last:
            self._intervals.append(self._last - last)

    def usual_s(self) -> float:
        """Seconds that a wait for the next batch may take before it is reported: the longer of ten seconds
        and five times the median of recent intervals.

        >>> Cadence().usual_s()
        10.0
        """
        intervals = sorted(self._intervals) or [0.0]
        median = (intervals[(len(intervals) - 1) // 2] + intervals[len(intervals) // 2]) / 2
        return max(USUAL_S, _MEDIANS * median)
