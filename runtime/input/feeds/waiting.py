"""How a member of a feed waits for a unit, and which process or member it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from commplan.diagnostics import fail
from commplan.runtime.input.feeds.attachment import Attachment
from commplan.runtime.input.observe.wait_log import LOG, WaitReporter
from commplan.runtime.input.ring.ring import Ring


@dataclass
class MemberWaiter:
    """The waits of `member`. timeout: of each, in seconds. is_open: whether the member has not been closed.
    file: of the plan."""

    attachment: Attachment
    member: int
    timeout: float
    is_open: Callable[[], bool]
    file: str
    _wait: tuple[int, WaitReporter] = field(default_factory=lambda: (-1, WaitReporter()))

    def look(self, unit: int, waited: float) -> None:
        """Log a wait that lasts. Raises CP0946 if it is for a member that the calling thread drives."""
        if self._wait[0] != unit:
            self._wait = unit, WaitReporter()
        self._refuse_own(unit)
        if self._wait[1].due(waited):
            blocker = blocked_by(self.attachment.ring, unit)
            LOG.warning("%s has waited %.0f s for %s", self._title, waited, blocker)

    def late(self, unit: int, waited: float) -> NoReturn:
        """Raise CP0947."""
        self._wait = -1, WaitReporter()
        fail(
            "CP0947",
            f"{self._title} waited {waited:.0f} s for {blocked_by(self.attachment.ring, unit)}",
            self._room,
            "end what does not go on, or close its feed",
            file=self.file,
        )

    @property
    def _title(self) -> str:
        return f"member {self.member} of {self.attachment.ring.memory.title}"

    @property
    def _room(self) -> str:
        ring = self.attachment.ring
        return f"{ring.slots * ring.header.get('unit')} records are kept at most"

    def _refuse_own(self, unit: int) -> None:
        ring, drivers, thread = self.attachment.ring, self.attachment.drivers, threading.get_ident()
        if ring.is_open(unit):
            return
        slowest = ring.slowest(unit)
        if slowest in self.attachment.members and drivers.get(slowest, thread) == thread:
            fail(
                "CP0946",
                f"{self._title} would wait for member {slowest}, which the same thread drives",
                self._room,
                f"drive member {slowest} first, give each member a thread of its own, or close its feed",
                file=self.file,
            )


def blocked_by(ring: Ring, unit: int) -> str:
    """The process or member that keeps `unit` from being made, and its state."""
    from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded if a wait lasts

    blocker = ring.blocker(unit)
    state = f": it is {process_state(blocker.pid)}" if blocker.pid else ""
    match blocker.kind:
        case "lock":
            return f"process {blocker.pid}, which holds the feed{state}"
        case "maker":
            return f"process {blocker.pid}, which makes it{state}"
        case "cursor":
            units = unit - ring.cursors[blocker.cursor].get("position")
            behind = units * ring.header.get("unit")
            return f"member {blocker.cursor} (process {blocker.pid}), which is {behind} records behind{state}"
        case _:
            return "a process that has a core for it"
