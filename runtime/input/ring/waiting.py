"""Waits of members for units, and the processes or members that block them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from commplan.diagnostics import Span, fail
from commplan.runtime.input.observe.wait_log import ClosedError, WaitReporter, log_warning
from commplan.runtime.input.ring.memory import ring_bell
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.shm.futex import LOOK_S

if TYPE_CHECKING:
    from commplan.runtime.input.ring.attachment import Attachment, Driver

UNDRIVEN_S = 120.0  # seconds of the longest wait for a member that no thread drives


@dataclass
class MemberWaiter:
    """The behavior of the waits of a member.

    Attributes:
        attachment: the ring and the members of this process.
        member: the number of the member that waits.
        timeout: the timeout of each wait in seconds.
        idle_s: seconds between two epochs after which an idle member releases slots.
        is_open: returns whether the member has not been closed.
        file: the file of the plan.
        span: the position of the load in the file; None for errors without a line.
        is_paced: whether members advance independently. If not, a thread that drives several members does not
            wait for those of its members that are behind.
    """

    attachment: Attachment
    member: int
    timeout: float
    idle_s: float
    is_open: Callable[[], bool]
    file: str
    span: Span | None = None
    is_paced: bool = True
    # The unit of the present wait, -1 if there is none, and the reporter of that wait.
    _wait: tuple[int, WaitReporter] = field(default_factory=lambda: (-1, WaitReporter()))

    def blocked(self, unit: int) -> None:
        """Handle a wait for a slot that is kept for other members.

        Members that the calling thread drives release the slot if they are between two epochs or not paced.
        If a member of another process has been idle for `idle_s`, this wakes that process.

        Threads do not wait for each other in a cycle. Suppose that member a_i waits for member b_i, and that
        the thread of b_i waits with member a_i+1. Then a_i is too far ahead of b_i, but a_i+1 is not, because
        otherwise its thread would raise the error. Summed over a cycle, these distances are contradictory.

        Raises:
            CommplanError: CP0946 if the wait is for another member that the calling thread drives.
        """
        attachment, ring = self.attachment, self.attachment.ring
        attachment.leave_forgotten()
        while (slowest := ring.slowest(unit)) >= 0 and not ring.is_open(unit):
            idle_since = ring.cursors[slowest].get("idle_since")
            is_idle = bool(idle_since)
            look = attachment.looks.get(slowest) if self._is_own(slowest) else None
            if look is None or slowest == self.member:
                if is_idle and time.monotonic_ns() - idle_since >= self.idle_s * 1e9:
                    ring_bell(ring.memory.bell("changed"))  # its process releases the slot
                return
            other = look()
            if other is None or not (is_idle or not self.is_paced):
                self._refuse_own(unit, slowest)
            if not is_idle:
                log_warning(
                    "%s goes on without member %d, which the same thread drives and which is %d records"
                    " behind: that one reads for itself until it has caught up",
                    self._title, slowest, self._behind(unit, slowest),
                )  # fmt: skip
            other.let_go()

    def look(self, unit: int, waited: float) -> None:
        """Check and log a long wait.

        Args:
            unit: the unit that the member waits for.
            waited: seconds since the start of the wait.

        Raises:
            CommplanError: if the wait cannot end: the error of a failed transfer, CP0926 for a call of user
                code that does not return, CP0928 if no thread can make units, CP0946 as `blocked`, CP0947 for
                a member that no thread drives.
            RuntimeError: as `Producers.check`.
        """
        attachment, ring = self.attachment, self.attachment.ring
        if self._wait[0] != unit:
            self._wait = unit, WaitReporter()
        if attachment.carriage is not None:
            attachment.carriage.check(unit)
        attachment.producers.check()
        self.blocked(unit)
        slowest = -1 if ring.is_open(unit) else ring.slowest(unit)
        if slowest >= 0:
            seconds = min(LOOK_S, self.timeout)
            attachment.content.meter.slowed(slowest, self._behind(unit, slowest), seconds)
        other = attachment.drivers.get(slowest)
        if waited > UNDRIVEN_S and other is not None and not _is_driven(other):
            self.late(unit, waited, ": no thread drives it")
        if attachment.calls is not None:
            attachment.calls.look(attachment.producers.running)
        if self._wait[1].due(waited):
            log_warning("%s has waited %.0f s for %s", self._title, waited, blocked_by(ring, unit))

    def late(self, unit: int, waited: float, remark: str = "") -> NoReturn:
        """Raise the timeout error, CP0947.

        Args:
            unit: the unit that the member waits for.
            waited: seconds since the start of the wait.
            remark: the end of the message.
        """
        self._wait = -1, WaitReporter()
        fail(
            "CP0947",
            f"{self._title} waited {waited:.0f} s for {blocked_by(self.attachment.ring, unit)}{remark}",
            self._room,
            "end the process that does not continue, or close its batches",
            span=self.span,
            file=self.file,
        )

    @property
    def _title(self) -> str:
        """The name of the member in messages."""
        return f"member {self.member} of {self.attachment.ring.memory.title}"

    @property
    def _room(self) -> str:
        """A note about the number of records that the ring keeps."""
        ring = self.attachment.ring
        return f"{ring.slot_count * ring.header.get('unit')} records are kept at most"

    def _behind(self, unit: int, cursor: int) -> int:
        """The number of records from the position of `cursor` to `unit`."""
        ring = self.attachment.ring
        return (unit - ring.cursors[cursor].get("position")) * ring.header.get("unit")

    def _is_own(self, member: int) -> bool:
        """Whether only the calling thread drives `member`: False for a member of another process."""
        caller, driver = threading.current_thread(), self.attachment.drivers.get(member)
        if driver is None:
            return False
        return driver.thread is caller or (
            driver.thread is None and driver.opener is caller and self._is_only_driver(caller)
        )

    def _is_only_driver(self, caller: threading.Thread) -> bool:
        """Whether no other thread can begin to drive a member."""
        drivers, cursors = self.attachment.drivers, self.attachment.ring.cursors
        blocked = {driver.thread for member, driver in drivers.items() if cursors[member].get("wanted")}
        return not any(
            thread is not caller and thread not in blocked and not thread.name.startswith("commplan")
            for thread in threading.enumerate()
        )

    def _refuse_own(self, unit: int, slowest: int) -> NoReturn:
        """Raise CP0946: the calling thread drives the member `slowest`, for which this one would wait."""
        fail(
            "CP0946",
            f"{self._title} would wait for member {slowest}, which the same thread drives",
            f"member {slowest} is {self._behind(unit, slowest)} records behind: {self._room}",
            f"drive member {slowest} first, give each member a separate thread, or close its batches",
            span=self.span,
            file=self.file,
        )


def _is_driven(driver: Driver) -> bool:
    """Whether the thread that requested the member's last batch is alive."""
    return driver.thread is not None and driver.thread.is_alive()


def awaited(attachment: Attachment, processes: Sequence[int]) -> int:
    """Find the process that blocks the oldest wait of the members of this process.

    Args:
        attachment: the ring and the members of this process.
        processes: the indices in the group of the processes of this host.

    Returns:
        The index in the group of the blocking process; -1 if there is none on this host, or no member waits.
    """
    ring = attachment.ring
    cursors = [ring.cursors[member] for member in list(attachment.members) if member >= 0]
    waits = [(cursor.get("waits_since"), cursor.get("wanted")) for cursor in cursors]
    unit = min((wait for wait in waits if wait[1]), default=(0, 0))[1] - 1
    try:
        makers, takers = ring.awaited(unit) if unit >= 0 else ([], [])
    except ClosedError:
        return -1
    blockers = (place for place in (*takers, *makers) if place != ring.place)
    return next((processes[place] for place in blockers if place < len(processes)), -1)


def blocked_by(ring: Ring, unit: int) -> str:
    """Describe the process or member that blocks `unit`, and its state."""
    from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded if a wait lasts

    blocker = ring.blocker(unit)
    state = f": it is {process_state(blocker.pid)}" if blocker.pid else ""
    match blocker.kind:
        case "lock":
            return f"process {blocker.pid}, which holds the shared memory{state}"
        case "maker":
            return f"process {blocker.pid}, which makes it{state}"
        case "cursor" if not blocker.pid:
            return "another host, which makes it"
        case "cursor":
            units = unit - ring.cursors[blocker.cursor].get("position")
            behind = units * ring.header.get("unit")
            return f"member {blocker.cursor} (process {blocker.pid}), which is {behind} records behind{state}"
        case _:
            return "a process that has a core for it"
