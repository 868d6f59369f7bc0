"""A message about ranks or processes that have not arrived, for waits that no watchdog observes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

from commplan.recorder.verdict import listed

NOTICE_S = 10.0  # seconds of waiting before late ranks are reported, unless a watchdog has its own limit


@dataclasses.dataclass
class Notice:
    """A message that is printed to standard error, at most once.

    Attributes:
        notes: Its notes: the waiting rank and its call, and how to end the wait.
        after_s: Seconds of waiting before it is printed.
        noun: The noun for a rank: `rank` or `process`.
    """

    notes: Sequence[str]
    after_s: float
    noun: str = "process"
    _is_due: bool = True

    def poll(self, waited: float, missing: Callable[[], Sequence[int]]) -> None:
        """Print the message on the first call with `waited` above `after_s`. Called repeatedly.

        Args:
            waited: The seconds of the wait so far.
            missing: Returns the ranks that have not arrived, in ascending order; empty if another rank
                reports them. In this case the message is never printed.
        """
        if not self._is_due or waited <= self.after_s:
            return
        self._is_due = False
        if ranks := missing():
            verb = "have" if len(ranks) > 1 else "has"
            text = f"commplan: {listed(self.noun, ranks)} {verb} not arrived within {waited:.0f} s"
            print("\nnote: ".join([text, *self.notes]), file=sys.stderr, flush=True)
