"""What a process does for others that share its stream, while its own members take nothing or wait."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commplan.runtime.data.control import LOOK_S
from commplan.runtime.data.group import Group
from commplan.runtime.data.shared import SharedRing
from commplan.runtime.data.telling import LOG, Lasting

if TYPE_CHECKING:
    from commplan.runtime.data.clocks import Clocks

IDLE_S = 0.5  # a member that begins its next epoch sooner than this finds the units that others keep for it


@dataclass(frozen=True)
class Company:
    """The processes that share a stream. start: the unit that they begin with. members: the first member that
    each of them holds."""

    group: Group
    start: int
    members: tuple[int, ...]


class Attendant:
    """A thread that keeps a process at its duty: its parts are made, and its slots let go, as long as a
    member of any process of its host is inside an epoch. It also tells whom the members here wait for."""

    def __init__(self, clocks: weakref.ref[Clocks], ring: SharedRing, company: Company) -> None:
        self._clocks, self._ring, self._company = clocks, ring, company
        self._wanted = 0
        self._since: float | None = None
        self._lasting = Lasting()
        self._thread = threading.Thread(target=self._attend, name="commplan-attendant", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended, which it does once the ring is stopped."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def want(self, epoch: int) -> None:
        """A member of this process is in `epoch`."""
        if epoch + 1 > self._wanted:
            self._wanted = epoch + 1
            self._ring.want(self._wanted)

    def _attend(self) -> None:
        idle = time.monotonic()  # since when no member here is inside an epoch
        while not self._ring.stopped:
            clocks = self._clocks()
            if clocks is None:
                return
            wanted, now = self._ring.wanted(), time.monotonic()
            idle = now if not clocks.idle() else min(idle, now)
            busy = wanted > 0 and clocks.attend(wanted - 1, take=now - idle > IDLE_S)
            self._look(clocks)
            del clocks  # nobody is kept alive by being attended to
            if not busy:
                self._ring.sleep(LOOK_S)

    def _look(self, clocks: Clocks) -> None:
        """Count, and tell about, a wait for another process's member."""
        number, now = clocks.pulling(), time.monotonic()
        slow = None if number is None else self._ring.slowest(number)
        if slow is None or number is None:
            self._since, self._lasting = None, Lasting()
            return
        process, taken = slow
        member, behind = self._company.members[process], (number - taken) * clocks.unit
        if self._since is None:
            self._since = now
        waited = now - self._since
        clocks.meter.slowed(member, behind, min(LOOK_S, waited))
        if self._lasting.due(waited):
            LOG.warning(
                "process %d has waited %.0f s for process %d, which holds member %d: it is %d records behind,"
                " and %d are kept",
                self._ring.index, waited, process, member, behind, clocks.slots * clocks.unit,
            )  # fmt: skip
