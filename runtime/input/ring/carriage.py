"""Transfers between hosts: the first living process of a host moves the parts of each unit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.ring.memory import persistent, ring_bell
from commplan.runtime.input.ring.words import LIVES
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.futex import LOOK_S, fence
from commplan.runtime.input.transport.transport import RegroupedError

if TYPE_CHECKING:
    from commplan.runtime.input.ring.ring import Ring
    from commplan.runtime.input.ring.units import Units
    from commplan.runtime.input.shm.slots import Slots
    from commplan.runtime.input.transport.transport import Carrier

_Result = TypeVar("_Result")


class Carriage:
    """Moves units of `ring` between hosts with `carrier`, if this process leads `host`.

    Args:
        ring: the ring of this host.
        units: the units of the ring.
        slots: a mapping of the slots that stays open while units are moved.
        carrier: the transport.
        host: the index of this host.

    Attributes:
        ring: the ring of this host.
        carrier: the transport.
        leader: the place of the leading process; 0 before the first `elect`.
        unit: the unit that is moved next.
        failure: the first unit that `run` could not move, with the error; None if there is none.
        thread: the identifier of the thread that calls `run`; 0 if there is none.
    """

    def __init__(self, ring: Ring, units: Units, slots: Slots, carrier: Carrier, host: int) -> None:
        self.ring, self.carrier = ring, carrier
        self.leader = 0
        self.unit = 0
        self.thread = 0
        self.failure: tuple[int, BaseException] | None = None
        self._units, self._slots, self._host = units, slots, host
        self._reserved = -1  # the last unit whose transfer `run` has reserved

    def leads(self) -> bool:
        """Whether this process is the leader, as of the last `elect`."""
        return self.leader == self.ring.place

    def elect(self) -> bool:
        """Choose another leader if the current one is not alive: the first living process of the host.

        Returns:
            True if this call made this process the leader.
        """
        if self._lives(self.leader):
            return False
        living = (place for place in range(self.ring.header.get("count")) if self._lives(place))
        self.leader = min(living, default=self.ring.place)
        return self.leads()

    def _lives(self, place: int) -> bool:
        return self.ring.processes[place].get("state") == LIVES and self.ring.memory.lives(place)

    def locked(self, change: Callable[[], _Result]) -> _Result:
        """Return `change()`, which acquires the ring's lock.

        The transfer thread waits for the lock without a timeout, because it must record each transfer. A
        consumer that moves units in its own thread has the timeout of `SharedMemory.locked`.
        """
        return change() if self.carrier.by_caller else persistent(change)

    def attempt(self, unit: int) -> bool:
        """Move `unit`, which `Ring.begin_carry` has reserved for this process.

        Returns:
            False if processes of another host have died and this host must make some of their parts first.
        """
        try:
            self.move(unit, self._slots.memory(unit))
        except RegroupedError as regrouped:
            parts, first = regrouped.division.parts_on(self._host), regrouped.number
            self.locked(lambda: self.ring.deal_here(parts, first))
            return False
        self.locked(lambda: self.ring.end_carry(unit))
        return True

    def move(self, unit: int, root: Any) -> None:
        """Move the parts of `unit`.

        Hosts that lack the previous unit, because a host died during its transfer, receive that unit, too.

        Args:
            unit: the unit.
            root: the memory of its slot.
        """
        layout, units = self._units.layout, self._units
        has_before = unit > self.ring.header.get("start")
        memory = self._slots.memory
        before = layout.row_slices(memory(unit - 1), units.rows(unit - 1)) if has_before else ()
        row_slices = layout.row_slices(root, units.rows(unit))
        self.carrier.carry(
            unit, row_slices, before, units.epoch_cursor.count(unit), lambda: self.ring.is_wanted(unit)
        )

    def check(self, unit: int) -> None:
        """Raise the error that prevents the transfer of `unit`, if any."""
        if self.failure is not None and self.failure[0] <= unit:
            raise self.failure[1]

    # --- the transfer thread ---

    def run(self, advance: Callable[[], bool]) -> None:
        """Move units in order until the ring stops or a unit cannot be moved.

        Args:
            advance: moves `unit` and increments it, if possible. Returns whether it did.
        """
        self.thread, bell = threading.get_ident(), self.ring.memory.bell("made")
        try:
            while not self.ring.memory.is_stopped:
                value = bell.value
                fence()
                if not advance():
                    futex.wait(bell, value, LOOK_S)
        except ClosedError:
            pass
        except BaseException as error:  # noqa: BLE001  consumers that wait for the unit raise it
            self.failure = self.unit, error
            ring_bell(bell)
        finally:
            self.thread = 0

    def advance(self, number: int) -> bool:
        """Move the next unit, if possible, independently of the consumers of this host.

        Args:
            number: the number of a cursor without a process. Its position is the first unit that has not been
                moved.

        Returns:
            Whether it was moved.
        """
        self.unit = unit = self.ring.cursors[number].get("position")
        if self.elect():
            self.locked(self.ring.reap)
        if not self.leads():
            return False
        self._ask(number, unit)
        if not self.ring.is_whole(unit):
            return False
        if self._reserved != unit and self.locked(lambda: self.ring.begin_carry(unit)):
            self._reserved = unit
        if self._reserved != unit or not self.attempt(unit):
            return False
        self.ring.release(number, unit + 1)
        return True

    def _ask(self, number: int, unit: int) -> None:
        """Request the slot of `unit` from members that are between two epochs, if a cursor needs `unit`."""
        armed = max((record.get("armed") for record in self.ring.present()), default=0)
        is_wanted = unit < armed and not self.ring.is_open(unit)
        self.ring.cursors[number].set(wanted=unit + 1 if is_wanted else 0)
        if is_wanted:
            ring_bell(self.ring.memory.bell("changed"))
