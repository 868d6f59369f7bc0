"""A consumer of a ring: it takes units in order, and shows them for as long as its arrays live."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.ring.memory import ring as ring_bell
from commplan.runtime.input.ring.producers import Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.words import ABSENT, ALONE, CURSOR, HOLDS, MADE, SPOILED
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.futex import LOOK_S, fence
from commplan.runtime.input.shm.slots import CompletionCounter, Slots
from commplan.wait import Wait, until

SILENT_S = 5.0  # seconds after which processes that do not begin a unit are passed over
_WANTED, _WAITS_SINCE, _WAITED_NS = (CURSOR[name] for name in ("wanted", "waits_since", "waited_ns"))


class Waiter(Protocol):
    """The behaviour of a consumer that waits for a unit."""

    @property
    def timeout(self) -> float:
        """Seconds, at most."""
        ...

    def is_open(self) -> bool:
        """Whether it still wants the unit."""
        ...

    def blocked(self, unit: int) -> None:
        """Called before a wait for a unit that has no slot yet. Raises if the wait is in vain."""

    def look(self, unit: int, waited: float) -> None:
        """Called a few times a second. Raises if the wait is in vain."""

    def late(self, unit: int, waited: float) -> NoReturn:
        """Raise the error after `timeout`."""
        ...


class Cursor:
    """Cursor `number` of `ring`. keep: units that may be shown without a copy.

    slots: a mapping of its own. held: slots that the batch in the making shows.
    """

    def __init__(
        self, ring: Ring, number: int, keep: int, slots: Slots, waiter: Waiter, recording: Recording
    ) -> None:
        self.ring, self.number, self.slots = ring, number, slots
        self.record = ring.cursors[number]
        self.held: dict[int, Any] = {}
        self._words, self._slot_words = self.record.words, ring.memory.slots
        self._count, self._kept = ring.slots, min(keep, ring.slots) - 1
        self._waiter, self._recording = waiter, recording
        self._look_s = min(LOOK_S, waiter.timeout)
        self._made = ring.memory.bell("made")
        self._returns = CompletionCounter(functools.partial(ring.release, number))
        slots.returned = self._returns.add  # holds nothing that holds this object

    def enter(self, **values: int) -> None:
        """Begin with words of this process. The caller holds the ring's lock."""
        words = dict.fromkeys(("records", "waited_ns", "wanted", "alone", "armed", "idle_since"), 0)
        self.record.set(process=self.ring.place + 1, since=time.monotonic_ns(), **words, **values)
        places = self.ring.header.get("cursor_places")
        self.ring.header.set(cursor_places=max(places, self.number + 1))

    def hold(self, position: int) -> None:
        """Units from `position` on are kept for it. The caller holds the ring's lock."""
        self._returns.upto = position
        self.record.set(position=position, state=HOLDS)

    def stand_alone(self, position: int) -> None:
        """No units are kept for it. The caller holds the ring's lock."""
        self.record.set(position=position, state=ALONE)

    def pass_over(self, units: Iterable[int]) -> None:
        """It does not take these units."""
        for unit in units:
            self._returns.add(unit)

    def take(self, unit: int) -> tuple[Any, int, int]:
        """The bytes of the slot of `unit`, the nanoseconds that it waited for it, and 1 if a part failed or
        records were skipped. The slot is shown until `held` and all arrays of it are gone."""
        slots, words = self.slots, self._slot_words[unit % self._count].words
        slots.recall_before(unit - self._kept)  # `unit` needs a slot of its own
        waited = self.wait(unit, self.ring.is_made) if words[MADE] != unit + 1 else 0
        return slots.lend(unit, self.held), waited, words[SPOILED]

    def recall(self) -> None:
        """Let go of all slots; arrays that show them keep their content."""
        for unit in self.slots.lent():
            self.slots.recall(unit)

    # --- waiting ---

    def wait(self, unit: int, is_there: Callable[[int], bool]) -> int:
        """Wait until `is_there(unit)`, such as `Ring.is_made`. Returns the nanoseconds that it took."""
        words, begun = self._words, time.monotonic_ns()
        words[_WAITS_SINCE], words[_WANTED] = begun, unit + 1
        record, waited = self._recording.record, 0
        operation = record.begin("wait", unit) if record is not None else 0
        try:
            if not self.ring.is_open(unit):
                self._waiter.blocked(unit)
            if not self._is_there_after(unit, is_there, self._look_s):
                self._wait_long(unit, is_there)
        finally:
            words[_WANTED] = 0
            if record is not None:
                record.end(operation)
            waited = time.monotonic_ns() - begun
            words[_WAITED_NS] += waited
        return waited

    def _is_there_after(self, unit: int, is_there: Callable[[int], bool], seconds: float) -> bool:
        """Whether `is_there(unit)`, after a sleep of `seconds` at most."""
        bell = self._made
        seen = bell.value
        fence()
        if not is_there(unit) and seconds:
            futex.wait(bell, seen, seconds)
        result = is_there(unit)
        fence()  # the slot is read after this
        return result

    def _wait_long(self, unit: int, is_there: Callable[[int], bool]) -> None:
        ring, waiter = self.ring, self._waiter

        def attempt(seconds: float) -> bool:
            if ring.memory.is_stopped or not waiter.is_open():
                raise ClosedError
            return self._is_there_after(unit, is_there, seconds)

        def look(waited: float) -> None:
            if not ring.reap():
                waiter.look(unit, waited)
            if waited > SILENT_S:
                ring.excuse(unit)

        _ = ring.reap()  # a part that a dead process has claimed is free now
        wait = Wait(waiter.timeout, functools.partial(waiter.late, unit), look, LOOK_S)
        if not attempt(0.0):
            _ = until(attempt, wait)

    def close(self) -> None:
        """Show nothing any more.

        Raises:
            CommplanError: CP0923 if there is no memory for arrays that are still shown; it is open as before.
        """
        self.held = {}
        self.slots.close()


def leave(ring: Ring, number: int) -> None:
    """No units are kept for cursor `number` any more, and its place is free."""
    ring.cursors[number].set(state=ABSENT, process=0)
    ring_bell(ring.memory.bell("changed"))
    ring_bell(ring.memory.bell("made"))
    ring.call_maker()
