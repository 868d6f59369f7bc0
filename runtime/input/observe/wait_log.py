"""Reports of long waits on the logger `commplan.input`, and the exception that ends a wait.

`WaitReporter` decides when one wait is reported. `Cadence` decides how long the wait for a batch may take.
"""

from __future__ import annotations

import time
from collections import deque

# Times in seconds.
TELL_S = 5.0  # a wait is reported after this time, and again each time its duration has doubled
PATIENCE_S = 1800.0  # the default timeout for live but silent peers: includes compilation and start-up
START_S = 30.0  # the first report of a wait for peers that start, which takes different times
USUAL_S = 10.0  # a wait for the next batch that is shorter is not reported, see `Cadence`
_MEDIANS = 5.0  # the same limit as a multiple of the median interval between batches
_INTERVALS = 16  # the number of latest intervals of which the median is taken


def log_warning(message: str, *arguments: object) -> None:
    """Log a warning on the logger `commplan.input`. `logging` is loaded here, because few processes warn."""
    import logging  # noqa: PLC0415

    logging.getLogger("commplan.input").warning(message, *arguments, stacklevel=2)


class ClosedError(Exception):
    """The batches were closed during a wait."""


class WaitReporter:
    """Decides when a wait is reported: after some time, and again each time its duration has doubled.

    Args:
        first: Seconds before the first report; None for `TELL_S`.
    """

    def __init__(self, first: float | None = None) -> None:
        self._next = TELL_S if first is None else first  # the seconds of waiting before the next report

    def due(self, waited: float) -> bool:
        """Whether a wait that has lasted for `waited` seconds must be reported now."""
        if waited <= self._next:
            return False
        self._next *= 2
        return True


class Cadence:
    """Measures the intervals between batches, to decide how long the wait for the next one may take."""

    def __init__(self) -> None:
        self._last = 0.0  # when the last batch arrived, on `time.monotonic`; 0 before
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def record_arrival(self) -> None:
        """Record that a batch has arrived now."""
        last, self._last = self._last, time.monotonic()
        if last:
            self._intervals.append(self._last - last)

    def usual_s(self) -> float:
        """Seconds that a wait for the next batch may take before it is reported.

        The longer of ten seconds and five times the median of the last 16 intervals.

        >>> Cadence().usual_s()
        10.0
        """
        intervals = sorted(self._intervals) or [0.0]
        median = (intervals[(len(intervals) - 1) // 2] + intervals[len(intervals) // 2]) / 2
        return max(USUAL_S, _MEDIANS * median)
