"""The threads of a process that make units for all cursors of a ring."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input.observe.wait_log import ClosedError, log_warning
from commplan.runtime.input.ring.claims import Claim
from commplan.runtime.input.ring.memory import persistent
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import Units
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.futex import LOOK_S, fence
from commplan.runtime.input.shm.slots import Slots

if TYPE_CHECKING:
    from commplan.runtime.input.observe.batch_record import BatchRecord

MAINTENANCE_S = 2.0  # seconds between checks of whether this process may make units
_PERIOD = 64  # units
_TIMED = range(1, 4)  # the units of each period whose parts are timed; the first one begins a new measurement
_CHEAP_US = 2000  # microseconds: a unit that takes less time is made by one thread
_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # times of the reading thread in nanoseconds


@dataclass
class Recording:
    """A reference to the record of this process's run, which may begin and end while threads use it.

    Attributes:
        record: the record; None if the run is not recorded.
    """

    record: BatchRecord | None = None


@dataclass
class Producers:
    """The threads of a process that make units: a supervisor and up to `Ring.threads` makers.

    Attributes:
        ring: the ring, which this process has joined.
        units: makes the units.
        slots: a mapping of the slots that only these threads use, or private slots.
        name: the prefix of the names of the threads.
        recording: receives an entry for each claim.
        ended: called when the last thread has ended. Detached threads do not count.
        maintain: called by the supervisor every `MAINTENANCE_S` seconds, and when the bell `changed` rings.
        running: the threads; some may have ended.
        detached: the identifiers of the threads that have been detached.
        failure: the error that ended a thread; None if there is none. Errors of user functions belong to
            parts.
        alive: the number of threads that have begun and not ended, without detached ones.
    """

    ring: Ring
    units: Units
    slots: Slots
    name: str
    recording: Recording
    ended: Callable[[], None]
    maintain: Callable[[], None]
    running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    detached: set[int] = field(default_factory=set[int])
    failure: BaseException | None = None
    alive: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun: set[str] = field(default_factory=set[str])  # the suffixes of `begin_once`
    _makers: int = 0  # threads that make parts or wait for them
    _waiting: int = 0  # those that wait
    _refusal: CommplanError | None = None  # the reason why the last maker could not be started
    _making: dict[int, Claim] = field(default_factory=dict[int, Claim])  # by thread identifier
    _part_us: int = _CHEAP_US  # the recent time of making a part in microseconds

    def start(self) -> None:
        """Start the supervisor, unless it has begun.

        Raises:
            CommplanError: CP0928 if no thread can be started.
        """
        self.begin_once(self._supervise, "supervisor")

    def join(self, seconds: float) -> None:
        """Wait for all threads to end.

        Args:
            seconds: the timeout for each thread; a user function may hang.
        """
        finished = {threading.current_thread()}
        while threads := [thread for thread in self.running if thread not in finished]:
            for thread in threads:  # the first of them may have started another
                finished.add(thread)
                thread.join(seconds)

    def check(self) -> None:
        """Check that threads have not failed outside of user functions.

        Raises:
            RuntimeError: if a thread has failed; its error is the cause.
            CommplanError: CP0928 if no maker can be started and no other process may make units.
        """
        if self.failure is not None:
            raise RuntimeError(f"a thread of {self.name} has failed") from self.failure
        refusal = self._refusal
        if refusal is not None and not self._makers and self.ring.eligible() == [self.ring.place]:
            raise refusal

    def detach(self) -> None:
        """Detach the threads that still make parts, so that other processes can make these parts.

        Detached threads write to private memory. If this memory cannot be allocated, the threads keep their
        claims until they end.
        """
        with self._lock:
            try:
                for unit in {claim.unit for claim in self._making.values()}:
                    self.slots.detach(unit)
            except OSError as error:
                title = self.ring.memory.title
                log_warning("%s waits for a thread of this process: %s", title, error.strerror)
                return
            self.detached |= self._making.keys()
            self.alive -= len(self._making)
            is_last = self.alive == 0 and bool(self._making)
            self._making.clear()
        if is_last:
            self.ended()

    def begin(self, target: Callable[[], object], suffix: str) -> None:
        """Start another thread of this ring. `ended` is not called before this thread has ended.

        The thread registers itself. Therefore an interruption at any point leaves no entry of a thread that
        has not begun.

        Args:
            target: the function that the thread runs.
            suffix: the end of the thread's name.

        Raises:
            CommplanError: CP0928 if no thread can be started.
        """
        is_added = threading.Event()

        def run() -> None:
            with self._lock:
                self.alive += 1
                self.running = [other for other in self.running if other.is_alive()] + [thread]
            is_added.set()
            if not self.ring.memory.is_stopped:
                target()

        thread = threading.Thread(target=self._run, args=(run,), name=f"{self.name}-{suffix}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            fail("CP0928", f"no thread for making batches can be started: {error}", "ulimit -u")
        is_added.wait()

    def begin_once(self, target: Callable[[], object], suffix: str) -> None:
        """Start a thread as `begin` does, unless one with this `suffix` has begun."""

        def run() -> None:
            with self._lock:
                begins = suffix not in self._begun
                self._begun.add(suffix)
            if begins:
                target()

        if suffix not in self._begun:
            self.begin(run, suffix)

    def _run(self, target: Callable[[], object]) -> None:
        """Run a thread: call `target`, handle its errors, and count the end of the thread."""
        try:
            target()
        except ClosedError:
            pass
        except CommplanError as error:  # another process holds the lock: `_supervise` starts a new maker
            log_warning("%s", error.diagnostics[0].message)
        except BaseException as error:  # noqa: BLE001  raised by `check`
            self.failure = error
        finally:
            self.units.release_thread()
            with self._lock:
                is_detached = threading.get_ident() in self.detached
                self.alive -= not is_detached
                is_last = self.alive == 0 and not is_detached
            if is_last:
                self.ended()

    def _supervise(self) -> None:
        """Start makers while this process is eligible, and call `maintain` periodically."""
        memory, bell = self.ring.memory, self.ring.memory.bell("changed")
        while True:
            value = bell.value
            fence()
            if memory.is_stopped:  # read after the bell, which `Ring.retire` rings
                return
            try:
                while self._makers < self.ring.threads():
                    self._begin_maker()
                self._refusal = None
            except CommplanError as error:  # retried in the next iteration
                self._refusal = error
                log_warning("%s", error.diagnostics[0].message)
            futex.wait(bell, value, MAINTENANCE_S)
            with contextlib.suppress(CommplanError, OSError):  # retried in the next iteration
                self.maintain()

    def _begin_maker(self) -> None:
        """Start a thread that makes units. Raises CP0928 if it cannot be started."""
        with self._lock:
            self._makers += 1
            number = self._makers
        try:
            self.begin(self._make_units, f"maker-{number}")
        except CommplanError:
            with self._lock:
                self._makers -= 1
            raise

    def _make_units(self) -> None:
        """Make units until the ring stops or this process has more makers than `Ring.threads`."""
        ring, memory = self.ring, self.ring.memory
        bell, is_counted = memory.work_bell(ring.place), True
        try:
            claim = ring.claim()
            while not memory.is_stopped:
                if claim is not None:
                    claim = self._make(claim)
                    continue
                value = bell.value
                self._count_waiting(1)
                try:
                    fence()
                    claim = ring.claim()
                    if claim is None:
                        with self._lock:  # surplus threads end one at a time
                            if self._makers > ring.threads():
                                is_counted = False
                                self._makers -= 1
                                return
                        futex.wait(bell, value, LOOK_S)
                finally:
                    self._count_waiting(-1)
                if claim is None:
                    claim = ring.claim()
        finally:
            if is_counted:
                with self._lock:
                    self._makers -= 1

    def _count_waiting(self, change: int) -> None:
        """Add `change` to the number of makers that wait, and mark whether `Ring.call_maker` may wake one."""
        with self._lock:
            self._waiting += change
            self.ring.mark_idle(self._waiting > 0)

    def _make(self, claim: Claim) -> Claim | None:
        """Make the parts of `claim`.

        Returns:
            The next claim; None if no part is due.

        Raises:
            ClosedError: if the ring stops before the parts are complete, or this thread was detached.
        """
        me, record, memory = threading.get_ident(), self.recording.record, self.ring.memory
        with self._lock:
            if memory.is_stopped:
                raise ClosedError
            self._making[me] = claim
        root = self.slots.memory(claim.unit)
        operation = record.begin("make", claim.unit) if record is not None else 0
        turn = claim.unit % _PERIOD
        before = _times() if turn in _TIMED else None
        try:
            result = self.units.fill(claim.unit, claim.parts, root, lambda: memory.is_stopped)
        except ClosedError:
            with self._lock:
                self._making.pop(me, None)
            raise
        after = _times() if before is not None else None
        if before is not None and after is not None:
            spent_us, waited_us = after[0] - before[0], max(0, after[1] - before[1])
            is_first, part_us = turn == _TIMED.start, (spent_us + waited_us) // claim.part_count
            self._part_us = part_us if is_first else min(part_us, self._part_us)
            self.ring.claims_units = self._part_us * self.ring.parts < _CHEAP_US
            if self.ring.header.get("most"):
                self.ring.measure(spent_us, waited_us, is_first=is_first)
        if record is not None:
            record.end(operation, result.error)
        with self._lock:
            if self._making.pop(me, None) is None:
                raise ClosedError  # this thread was detached: another process makes the part
            for part in claim.parts:
                self.units.note(claim.unit, part, root, result.error)
        # This process holds the claim until it is done. Meanwhile other threads may stop and detach.
        return persistent(lambda: self.ring.next_claim(claim, result.records, spoiled=result.is_spoiled))


def _times() -> tuple[int, int] | None:
    """The run time and the blocked time of the calling thread, in microseconds.

    Blocked time excludes waits for a core. It contains a constant offset, so only differences are meaningful.
    The result is None if the kernel does not report these times.
    """
    with contextlib.suppress(OSError, ValueError):
        ran, queued = map(int, _SCHEDSTAT.read_text().split()[:2])
        return ran // 1000, (time.perf_counter_ns() - ran - queued) // 1000
    return None
