"""A consumer of a ring. It takes units in order; arrays reference their slots without a copy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.ring.memory import ring_bell
from commplan.runtime.input.ring.producers import Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.words import ABSENT, CURSOR, HOLDS, MADE, PRIVATE, SPOILED
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.futex import LOOK_S, fence
from commplan.runtime.input.shm.slots import CompletionCounter, Slots
from commplan.wait import Wait, until

SILENT_S = 5.0  # seconds of a wait after which other makers are dealt no parts; see `Ring.excuse`
# Indices, because `Record.set` is too slow for every wait.
_WANTED = CURSOR["wanted"]
_WAITS_SINCE = CURSOR["waits_since"]
_WAITED_NS = CURSOR["waited_ns"]


class Waiter(Protocol):
    """The behavior of a consumer that waits for a unit: `GroupExchange` or `MemberWaiter`."""

    @property
    def timeout(self) -> float:
        """The longest wait in seconds."""
        ...

    def is_open(self) -> bool:
        """Whether the consumer has not been closed."""
        ...

    def blocked(self, unit: int) -> None:
        """Called before a wait for a unit without a slot. Raises if the wait cannot end."""
        ...

    def look(self, unit: int, waited: float) -> None:
        """Called a few times a second, after `waited` seconds. Raises if the wait cannot end."""
        ...

    def late(self, unit: int, waited: float) -> NoReturn:
        """Raise the timeout error, after `waited` seconds."""
        ...


class Cursor:
    """A cursor of a ring.

    Args:
        ring: the ring.
        number: the number of the cursor.
        keep: the most units that arrays may reference without a copy, at least 1.
        slots: a mapping of the slots. In a single process, the producers may use it, too.
        waiter: the behavior of waits.
        recording: receives an entry for each wait.

    Attributes:
        ring: the ring.
        number: the number of the cursor.
        slots: the mapping of the slots.
        record: the words of the cursor.
        roots: the bytes of the slots that are borrowed for batches in use, by unit.
    """

    def __init__(
        self, ring: Ring, number: int, keep: int, slots: Slots, waiter: Waiter, recording: Recording
    ) -> None:
        self.ring, self.number, self.slots = ring, number, slots
        self.record = ring.cursors[number]
        self.roots: dict[int, Any] = {}
        self._words, self._slot_words = self.record.words, ring.memory.slots
        self._slot_count = ring.slot_count
        self._earlier = min(keep, ring.slot_count) - 1  # borrowed units in addition to the one that is taken
        self._waiter, self._recording = waiter, recording
        self._look_s = min(LOOK_S, waiter.timeout)
        self._bell = ring.memory.bell("made")
        self._returns = CompletionCounter(functools.partial(ring.release, number))
        slots.returned = self._returns.add  # creates no reference cycle

    def enter(self, **values: int) -> None:
        """Initialize the words of the cursor except `state` and `position`. The caller holds the ring's lock.

        Args:
            **values: further words.
        """
        words = dict.fromkeys(("records", "waited_ns", "wanted", "private", "armed", "idle_since"), 0)
        self.record.set(process=self.ring.place + 1, since=time.monotonic_ns(), **words, **values)
        places = self.ring.header.get("cursor_places")
        self.ring.header.set(cursor_places=max(places, self.number + 1))

    def hold(self, position: int) -> None:
        """Keep the units from `position` on for this cursor. The caller holds the ring's lock."""
        self._returns.upto = position
        self.record.set(position=position, state=HOLDS)

    def hold_none(self, position: int) -> None:
        """Keep no units for this cursor, which is at `position`. The caller holds the ring's lock."""
        self.record.set(position=position, state=PRIVATE)

    def pass_over(self, units: Iterable[int]) -> None:
        """Release units that this cursor does not take."""
        for unit in units:
            self._returns.add(unit)

    def take(self, unit: int) -> tuple[Any, int, int]:
        """Wait for `unit` and borrow its slot until `roots` and all arrays no longer reference it.

        Returns:
            The bytes of the slot, the wait in nanoseconds, and 1 if a part failed or skipped records, else 0.

        Raises:
            CommplanError: CP0923 if there is no memory for copies of earlier units; otherwise as `wait`.
        """
        slots, slot_words = self.slots, self._slot_words[unit % self._slot_count].words
        slots.recall_before(unit - self._earlier)  # at most `keep` units are borrowed
        if slot_words[MADE] != unit + 1:
            waited_ns = self.wait(unit, self.ring.is_made)
        else:
            waited_ns = 0
            fence()  # the slot must be read after this check
        return slots.lend(unit, self.roots), waited_ns, slot_words[SPOILED]

    def recall(self) -> None:
        """Release all slots. Arrays that reference them keep their contents."""
        for unit in self.slots.lent():
            self.slots.recall(unit)

    # --- waiting ---

    def wait(self, unit: int, is_there: Callable[[int], bool]) -> int:
        """Wait until `is_there(unit)`.

        Args:
            unit: the unit.
            is_there: a condition such as `Ring.is_made`.

        Returns:
            The wait in nanoseconds.

        Raises:
            ClosedError: if the ring is stopped or the consumer is closed.
            CommplanError: the errors of the waiter.
        """
        words, begun = self._words, time.monotonic_ns()
        words[_WAITS_SINCE], words[_WANTED] = begun, unit + 1
        record, waited_ns = self._recording.record, 0
        operation = record.begin("wait", unit) if record is not None else 0
        try:
            self.wait_unrecorded(unit, is_there)
        finally:
            words[_WANTED] = 0
            if record is not None:
                record.end(operation)
            waited_ns = time.monotonic_ns() - begun
            words[_WAITED_NS] += waited_ns
        return waited_ns

    def wait_unrecorded(self, unit: int, is_there: Callable[[int], bool]) -> None:
        """Wait as `wait` does, in a thread other than the consumer's: it does not mark `unit` as wanted."""
        if not self.ring.is_open(unit):
            self._waiter.blocked(unit)
        if not self._is_there_after(unit, is_there, self._look_s):
            self._wait_long(unit, is_there)

    def _is_there_after(self, unit: int, is_there: Callable[[int], bool], seconds: float) -> bool:
        """Wait up to `seconds` for `is_there(unit)`; returns its value."""
        bell = self._bell
        value = bell.value
        fence()
        if not is_there(unit) and seconds:
            futex.wait(bell, value, seconds)
        result = is_there(unit)
        fence()  # the slot must be read after this check
        return result

    def _wait_long(self, unit: int, is_there: Callable[[int], bool]) -> None:
        """Wait up to the waiter's timeout, and check now and then that the wait can end."""
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

        _ = ring.reap()  # frees parts that dead processes had claimed
        wait = Wait(waiter.timeout, functools.partial(waiter.late, unit), look, LOOK_S)
        if not attempt(0.0):
            _ = until(attempt, wait)

    def close(self) -> None:
        """Release all slots. Arrays that reference them receive a copy.

        Raises:
            CommplanError: CP0923 if there is no memory for these copies; the cursor stays open.
        """
        self.roots = {}
        self.slots.close()


def leave(ring: Ring, number: int) -> None:
    """Free the place of cursor `number`. Units are no longer kept for it."""
    ring.cursors[number].set(state=ABSENT, process=0)
    ring_bell(ring.memory.bell("changed"))
    ring_bell(ring.memory.bell("made"))
    fence()
    ring.call_maker()
