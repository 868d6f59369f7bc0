"""Waits that last are told about on the logger `commplan.input`, again and again, less and less often; and
what is raised where one is called off."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque

LOG = logging.getLogger("commplan.input")
TELL_S = 5.0  # a wait as long as this is told about, and again when it has lasted twice as long
PATIENCE_S = 1800.0  # for what lives but is silent: compilation and start-up are part of it
START_S = 30.0  # the same where others have yet to start, which takes some longer than others
USUAL_S, _MEDIANS, _INTERVALS = 10.0, 5.0, 16


class ClosedError(Exception):
    """The batches were closed while something was waited for."""


class WaitReporter:
    """One wait. first: seconds after which it is told about, TELL_S if None."""

    def __init__(self, first: float | None = None) -> None:
        self._next = TELL_S if first is None else first

    def due(self, waited: float) -> bool:
        """Whether a wait that has lasted for `waited` seconds is to be told about now."""
        if waited <= self._next:
            return False
        self._next *= 2
        return True


class Cadence:
    """How often batches come."""

    def __init__(self) -> None:
        self._last = 0.0
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def came(self) -> None:
        """One has come now."""
        last, self._last = self._last, time.monotonic()
        if last:
            self._intervals.append(self._last - last)

    def usual_s(self) -> float:
        """Seconds that a wait for the next one may take before it is told about: ten, or five times the
        median between the last ones, whichever is longer.

        >>> Cadence().usual_s()
        10.0
        """
        return max(USUAL_S, _MEDIANS * statistics.median(self._intervals or [0.0]))
