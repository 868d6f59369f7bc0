"""A single process, or a process of a group: it makes its parts of the units and takes all units.

Each host has a ring. The leader of a host is its first living process. When the parts of this host are made,
the leader exchanges the parts of the unit with other hosts. Other processes wait for the complete unit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from commplan.diagnostics import CommplanError
from commplan.input.work_partition import Division
from commplan.ir.plan import Ref
from commplan.runtime.input.layout import Array, aligned
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.wait_log import Cadence, WaitReporter
from commplan.runtime.input.ring import cursor as cursors
from commplan.runtime.input.ring.cursor import Cursor
from commplan.runtime.input.ring.memory import ring_bell
from commplan.runtime.input.ring.peer_errors import PeerErrors
from commplan.runtime.input.ring.producers import Producers, Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import Units
from commplan.runtime.input.ring.words import DIED, LEAVES, LEFT, LIVES, PARTS_MADE
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.slots import Slots
from commplan.runtime.input.transport.transport import RegroupedError
from commplan.wait import LONGEST_S

if TYPE_CHECKING:
    from commplan.runtime.input.ring.carriage import Carriage


@dataclass(eq=False)
class GroupExchange:
    """This process's side of a group; a single process is a group of one.

    Units are batches, numbered from the first batch of this run on.

    Methods that wait for a unit raise a `CommplanError`: CP0920 if a process died or left, CP0921 if one does
    not respond, CP0922 if one is at another batch, CP0926 if a call of this process does not return, or the
    errors of records. After `stop` they raise `ClosedError`.

    Attributes:
        ring: the ring of this host.
        units: makes the units.
        slots: a mapping of the slots for arrays that the process receives.
        errors: raises errors about other processes.
        key: the id in `meter` of the value that is shared; "" in a single process, which counts no waits.
        meter: the costs of the input.
        keep: the most batches that arrays may reference at a time without a copy.
        calls: detects user functions that do not return.
        recording: the record of this process's run.
        awaited: the index in the group of the process that blocks a long wait; -1 if there is none.
        group: the group.
        carrier: moves parts between hosts; None on a single host.
        made_slots: a mapping of the slots for the producers; `slots` itself if they are private.
        producers: the threads that make units.
    """

    ring: Ring
    units: Units
    slots: Slots
    errors: PeerErrors
    key: str
    meter: Meter
    keep: int
    calls: OverdueCalls
    recording: Recording
    awaited: int = -1
    _has_left: bool = False
    _is_released: bool = False  # this object no longer uses the ring; the last thread leaves it
    _has_ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cadence: Cadence = field(default_factory=Cadence)
    _reporter: WaitReporter = field(default_factory=WaitReporter)
    _reported: int = -1  # the unit that `_reporter` reports

    def __post_init__(self) -> None:
        ring, group = self.ring, self.errors.group
        self.group, self.carrier, self._local = group, group.carrier, group.local
        self._carriage: Carriage | None = None
        if group.carrier is not None:
            from commplan.runtime.input.ring.carriage import Carriage  # noqa: PLC0415  for several hosts

            self._carriage = Carriage(ring, self.units, self.slots, group.carrier, group.host)
        self._cursor = Cursor(ring, ring.place, self.keep, self.slots, weakref.proxy(self), Recording())
        self.made_slots = self.slots if self.slots.is_private else ring.memory.mapped_slots()
        name = f"commplan-{group.run_id}"
        self._armed = 0  # batches before this number have been requested
        self._process = ring.processes[ring.place].words
        self._is_in_order = group.count == 1  # whether all processes count batches equally
        self.producers = Producers(
            ring, self.units, self.made_slots, name, self.recording, self._leave_ring_at_end, lambda: None
        )

    # --- producing ---

    def arm(self, upto: int) -> None:
        """Request all batches before number `upto`, and start the threads that make and move them."""
        self.producers.start()
        if self._carriage is not None and not self._carriage.carrier.by_caller:
            advance = functools.partial(self._advance, self._carriage)
            self.producers.begin_once(functools.partial(self._carriage.run, advance), "carry")
        self._armed = upto
        self.ring.arm(self.ring.place, upto)
        if self._carriage is not None:
            ring_bell(self.ring.memory.bell("made"))

    def in_use(self) -> tuple[int, int]:
        """The number of slots, and the number of slots that contain a batch, complete or in progress."""
        used = self.ring.header.get("next") - (self.ring.least() or 0)
        return self.ring.slot_count, max(0, min(used, self.ring.slot_count))

    # --- taking ---

    def take(self, number: int) -> tuple[Any, Sequence[int]]:
        """Wait for batch `number` and borrow its slot until `pass_on`, if no record of the batch was skipped.

        Returns:
            The bytes of the slot, and the parts of the batch that this process has made. The first is None if
            a part failed or skipped records; then use `readable` and `lend`.

        Raises:
            CommplanError: as the class says.
        """
        root, waited_ns, is_spoiled = self._cursor.take(number)
        if waited_ns:
            self.awaited = -1
        self._cadence.record_arrival()
        if is_spoiled:
            return None, ()
        if not self._is_in_order:
            self._check(number)
        return root, self.ring.made_here(number) if self._process[PARTS_MADE] else ()

    def readable(self, number: int) -> None:
        """Wait until batch `number` is made.

        Raises:
            CommplanError: the error of the first part that failed, or an error about another process.
        """
        ring = self.ring
        if ring.is_made(number):
            futex.fence()  # the slot must be read after this check
        else:
            begun = time.perf_counter()
            try:
                self._cursor.wait(number, ring.is_made)
                self.awaited = -1
            finally:
                if self.key:
                    self.meter.add(self.key, wait_s=time.perf_counter() - begun)
        self._cadence.record_arrival()
        if not self._is_in_order or ring.is_spoiled(number):
            self._check(number)

    def _check(self, number: int) -> None:
        """Raise the error of the first part of batch `number` that failed or belongs to another batch.

        Does nothing if there is no such part.
        """
        trouble = self.units.trouble(number, self.slots.memory(number))
        if trouble is None:
            self._is_in_order = self._carriage is None
            return
        process = trouble.process
        if trouble.errors:
            self.errors.raised(process, trouble.errors)
        if trouble.other:
            self.errors.lost(process, f"stopped: {trouble.other}")
        maker, mine = self.ring.maker_of_part(number, trouble.part), self.units.position(number)
        process = self._local[maker] if maker >= 0 else self._division.readers[trouble.part]
        self.errors.fail(
            "CP0922",
            f"process {process} of {self.group.count} is at epoch {trouble.position.epoch}, step "
            f"{trouble.position.step}, this one at epoch {mine.epoch}, step {mine.step}",
        )

    @property
    def _division(self) -> Division:
        """The division of the first flow. All flows have the same number of parts."""
        return next(iter(self.units.layout.divisions.values()))

    def lend(self, number: int) -> tuple[Mapping[Ref, Array], Sequence[int] | None]:
        """Borrow the slot of batch `number` until `pass_on`.

        Returns:
            The read-only arrays of the batch, and the parts of it that this process has made; None if it made
            all of them, as the only process.
        """
        views = self.units.layout.views(self.slots.lend(number, self._cursor.roots), writable=False)
        return views, self.ring.made_here(number) if self.group.count > 1 else None

    def pass_on(self, number: int) -> None:
        """Release the slots of batches before `number` that no array references."""
        roots = self._cursor.roots
        for old in tuple(roots):
            if old < number:
                roots.pop(old, None)  # another thread may close the batches

    def recall_older(self, number: int) -> None:
        """Recall the slots of batches before the last `keep`, of which `number` is the newest."""
        self.slots.recall_before(number - self.keep + 1)

    def ahead(self, number: int) -> int:
        """The number of consecutive batches from `number` on that are made."""
        return self.ring.made_from(number)

    # --- waiting ---

    @property
    def timeout(self) -> float:
        """The timeout of waits in seconds.

        With several hosts, the thread that leads a host has the group's timeout, and all others have twice as
        much: the leader finds the blocking process and raises its error first.
        """
        if self.group.count == 1:
            return LONGEST_S  # a call that does not return ends it
        is_shorter = self.carrier is None or (self.leads() and not self._is_led_by_thread())
        return self.group.timeout * (1 if is_shorter else 2)

    def _is_led_by_thread(self) -> bool:
        """Whether another thread of this process leads the host.

        Only that thread looks for the reason of a wait, because the error must reach the other hosts before
        the caller raises it and leaves.
        """
        thread = 0 if self._carriage is None else self._carriage.thread
        return thread not in (0, threading.get_ident()) and self.leads()

    def is_open(self) -> bool:
        """True: `stop` also stops the ring, which ends the waits."""
        return True

    def blocked(self, unit: int) -> None:
        """Do nothing: other processes still have to take the previous unit in the slot."""

    def look(self, unit: int, waited: float) -> None:
        """Check and report a long wait. Raises an error if the wait cannot end.

        Args:
            unit: the unit that this process waits for.
            waited: seconds since the start of the wait.
        """
        if self._carriage is not None:
            self._carriage.check(unit)
            self._carriage.elect()
        if self._is_led_by_thread():
            return
        if self._reported != unit:
            self._reporter, self._reported = WaitReporter(self._cadence.usual_s()), unit
        if self.ring.ends_with_one:
            for place, record in enumerate(self.ring.cursors[: len(self._local)]):
                if self._state(place) in (LEFT, DIED) and record.get("position") <= unit:
                    self._lost(place)
        self.producers.check()
        self.calls.look(self.producers.running)
        makers, takers = self._awaited_by(unit)
        if self.ring.place in takers or not (makers or takers):
            return
        place = (takers or makers)[0]
        self.awaited = self._local[place]
        if self._reporter.due(waited):
            batch = self.units.epoch_cursor.count(unit - self.ring.slot_count * bool(takers))
            task = f"to take batch {batch}" if takers else f"for its part of batch {batch}"
            self.errors.warn(self.awaited, waited, task, self.ring.processes[place].get("pid"))

    def late(self, unit: int, waited: float) -> NoReturn:
        """Raise the timeout error, about a call of this process if no other process blocks `unit`."""
        makers, takers = self._awaited_by(unit)
        places = [place for place in (*takers, *makers) if place != self.ring.place]
        if not places:
            self.calls.fail(self.producers.running, waited)
        self._silent(self._give_up(places[0]), self.timeout)

    def _awaited_by(self, unit: int) -> tuple[list[int], list[int]]:
        """The places of other processes that must make or move `unit`, and of those that must take an
        earlier one; see `RingState.awaited`."""
        makers, takers = self.ring.awaited(unit)
        if self._carriage is not None and self.ring.is_whole(unit):
            makers = makers or [self._carriage.leader]
        return [place for place in makers if place not in (self.ring.place, -1)], takers

    def _state(self, place: int) -> int:
        """The state of the process at `place`, such as `LIVES`."""
        return self.ring.processes[place].get("state")

    def _lives(self, place: int) -> bool:
        return self._state(place) == LIVES and self.ring.memory.lives(place)

    def _silent(self, place: int, seconds: float) -> NoReturn:
        """Raise the error for the process at `place`, which has not responded for `seconds`."""
        from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded if a wait lasts

        pid = self.ring.processes[place].get("pid")
        self.errors.silent(self._local[place], seconds, process_state(pid))

    def _lost(self, place: int) -> NoReturn:
        """Raise the error for the process at `place`, which has ended, or for the process that caused it."""
        culprit = self._give_up(place)
        if culprit == self.ring.place:
            self.errors.lost(self._local[place], "left: it had waited for this one in vain")
        if self._lives(culprit):
            self._silent(culprit, self.group.timeout)
        has_left = self._state(culprit) in (LEAVES, LEFT)
        how = "left: its batches were closed before the epoch's end" if has_left else "died"
        self.errors.lost(self._local[culprit], how)

    def _give_up(self, place: int) -> int:
        """Find the process that caused the failed wait for the process at `place`.

        That process may have ended because of another process, and so on. The result is also stored for the
        other processes.

        Returns:
            The place of the process that caused the first failure.
        """
        for _ in self._local:
            culprit = self.ring.processes[place].get("culprit")
            if self._lives(place) or not culprit:
                break
            place = culprit - 1
        self.ring.processes[self.ring.place].set(culprit=place + 1)
        futex.fence()  # the store must precede the departure of this process
        return place

    # --- between hosts ---

    def leads(self) -> bool:
        """Whether this process leads its host."""
        return self._carriage is not None and self._carriage.leads()

    def carry_ahead(self, number: int) -> None:
        """Move all batches up to `number` in the caller's thread, if this process leads."""
        carriage = self._carriage
        if carriage is None or not carriage.carrier.by_caller or not carriage.leads():
            return
        with self.meter.working(self.key, waits=True):
            while carriage.unit <= number:
                if self.ring.is_made(carriage.unit):
                    carriage.unit += 1
                else:
                    self._carry(carriage, carriage.unit)

    def _advance(self, carriage: Carriage) -> bool:
        """Carry the next batch, if this process leads. Returns whether there may be more to do."""
        ring, number = self.ring, carriage.unit
        carriage.elect()
        if not carriage.leads() or number >= self._armed:
            return False
        if number >= (ring.least() or 0) and not ring.is_made(number):
            # The timeout must not count the time between two requests of the callers of this host.
            if not (ring.is_whole(number) or ring.is_wanted(number)):
                return False
            self._carry(carriage, number)
        else:
            carriage.unit += 1
        return True

    def _carry(self, carriage: Carriage, number: int) -> None:
        """Move the parts of batch `number` between hosts. If a wait fails, send its error instead.

        If another process has reserved the transfer, wait until it completes the transfer or has ended.
        """
        ring = self.ring
        try:
            self._cursor.wait_unrecorded(number, ring.is_whole)
        except CommplanError as error:
            root = aligned((self.units.layout.nbytes,), np.dtype(np.uint8))
            for part in self._division.parts_on(self.group.host):
                self.units.note(number, part, root, error)
            with contextlib.suppress(RegroupedError):
                carriage.move(number, root)
            raise
        if not carriage.locked(lambda: ring.begin_carry(number)):
            self._cursor.wait_unrecorded(number, ring.is_carried_or_free)
            return
        while not carriage.attempt(number):
            self._cursor.wait_unrecorded(number, ring.is_whole)

    # --- the end ---

    def stop(self) -> None:
        """End the waits and the producers of this process."""
        self.ring.retire()
        if self.carrier is not None:
            self.carrier.stop()

    def leave(self) -> None:
        """Release all slots and leave the group."""
        with self._lock:
            if self._has_left:
                return
            self._has_left = True
        self._cursor.roots = {}
        try:
            if self.slots.is_private:
                self._cursor.recall()  # the producers may still use the slots
            else:
                self._cursor.close()
        finally:
            if not self.ring.ends_with_one:
                cursors.leave(self.ring, self.ring.place)
            if self.carrier is not None:
                self.carrier.close()
            self._is_released = True
            self._leave_ring_at_end()

    def _leave_ring_at_end(self) -> None:
        """Leave the ring if neither this object nor the producers use it any more."""
        with self._lock:
            is_last = self._is_released and not self.producers.alive and not self._has_ended
            self._has_ended |= is_last
        if is_last:
            self.units.close()
            self.producers.ended = lambda: None  # breaks a reference cycle, so that the memory is freed now
            self.ring.leave()
            self.made_slots.close()
            # In the record, a part of a detached thread stays in progress.
            if self.recording.record is not None and not self.producers.detached:
                self.recording.record.close()
