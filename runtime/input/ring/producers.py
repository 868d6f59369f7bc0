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
from commplan.runtime.input.observe.wait_log import LOG, ClosedError
from commplan.runtime.input.ring.claims import Claim
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import Units
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.futex import LOOK_S
from commplan.runtime.input.shm.slots import Slots

if TYPE_CHECKING:
    from commplan.runtime.input.observe.batch_record import BatchRecord

TEND_S = 2.0  # seconds between two looks at whether this process is to make units
_EVERY, _MEASURED = 64, range(1, 4)  # of so many units, those whose making is measured
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass
class Recording:
    """The record of this process's run, for those that write to it; None if it keeps none."""

    record: BatchRecord | None = None


@dataclass
class Producers:
    """One thread that tends the others, and as many as make units here (`Ring.threads`).

    slots: a mapping of its own. recording: parts that are made go there. ended: called when the last thread
    has ended, except for those that were detached. tend: called every few seconds.
    """

    ring: Ring
    units: Units
    slots: Slots
    name: str
    recording: Recording
    ended: Callable[[], None]
    tend: Callable[[], None]
    running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    detached: set[int] = field(default_factory=set[int])  # threads
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _alive: int = 0
    _makers: int = 0
    _making: dict[int, Claim] = field(default_factory=dict[int, Claim])  # by the thread that makes it

    def start(self) -> None:
        """Start the first thread.

        Raises:
            CommplanError: CP0928 if the system gives no thread.
        """
        self.begin(self._keep, "tend")

    def join(self, seconds: float) -> None:
        """Wait until each thread has ended, for `seconds` at most: a function of the user may hang in it."""
        for thread in list(self.running):
            if thread is not threading.current_thread():
                thread.join(seconds)

    def detach(self) -> None:
        """Let threads that still make parts write to private memory, so that others can make these parts.

        If there is no memory for that, the threads keep their claims until they end.
        """
        with self._lock:
            try:
                for unit in {claim.unit for claim in self._making.values()}:
                    self.slots.detach(unit)
            except OSError as error:
                title = self.ring.memory.title
                LOG.warning("%s waits for a thread of this process: %s", title, error.strerror)
                return
            self.detached |= self._making.keys()
            self._alive -= len(self._making)
            is_last = self._alive == 0 and bool(self._making)
            self._making.clear()
        if is_last:
            self.ended()

    def begin(self, target: Callable[[], object], suffix: str) -> None:
        """Start another thread of this ring. `ended` is called after it has ended, too.

        Raises:
            CommplanError: CP0928 if the system gives no thread.
        """
        thread = threading.Thread(target=self._run, args=(target,), name=f"{self.name}-{suffix}", daemon=True)
        with self._lock:
            self._alive += 1
            self.running = [other for other in self.running if other.is_alive()] + [thread]
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._alive -= 1
                self.running.remove(thread)
            fail("CP0928", f"a feed needs threads, and none can be started: {error}", "ulimit -u")

    def _run(self, target: Callable[[], object]) -> None:
        try:
            target()
        except ClosedError:
            pass
        except CommplanError as error:  # another process holds the lock for long: the tender tries again
            LOG.warning("%s", error.diagnostics[0].message)
        finally:
            self.units.release_thread()
            with self._lock:
                is_detached = threading.get_ident() in self.detached
                self._alive -= not is_detached
                is_last = self._alive == 0 and not is_detached
            if is_last:
                self.ended()

    def _keep(self) -> None:
        """Start the threads that make units while this process is eligible."""
        memory, bell = self.ring.memory, self.ring.memory.bell("changed")
        while not memory.is_stopped:
            seen = bell.value
            try:
                while self._makers < self.ring.threads():
                    self._begin_maker()
            except CommplanError as error:  # another process makes units meanwhile, or this one later
                LOG.warning("%s", error.diagnostics[0].message)
            futex.wait(bell, seen, TEND_S)
            with contextlib.suppress(CommplanError, OSError):  # it is tried again
                self.tend()

    def _begin_maker(self) -> None:
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
        """Make units while this process should have as many threads that do."""
        ring, memory = self.ring, self.ring.memory
        bell, is_counted = memory.work_bell(ring.place), True
        try:
            while not memory.is_stopped:
                seen = bell.value
                claim = ring.claim_or_idle()
                if claim is not None:
                    self._make(claim)
                    continue
                with self._lock:  # of two surplus threads one at a time
                    if self._makers > ring.threads():
                        is_counted = False
                        self._makers -= 1
                        return
                futex.wait(bell, seen, LOOK_S)
        finally:
            if is_counted:
                with self._lock:
                    self._makers -= 1

    def _make(self, claim: Claim) -> None:
        me, record, memory = threading.get_ident(), self.recording.record, self.ring.memory
        with self._lock:
            if memory.is_stopped:
                raise ClosedError
            self._making[me] = claim
        root = self.slots.memory(claim.unit)
        operation = record.begin("make", claim.unit) if record is not None else 0
        place = claim.unit % _EVERY
        before = _times() if place in _MEASURED and self.ring.header.get("most") else None
        try:
            result = self.units.fill(claim.unit, claim.part, root, lambda: memory.is_stopped)
        except ClosedError:
            with self._lock:
                self._making.pop(me, None)
            raise
        after = _times() if before is not None else None
        if before is not None and after is not None:
            spent, waited = after[0] - before[0], max(0, after[1] - before[1])
            self.ring.measure(spent, waited, is_first=place == _MEASURED.start)
        if record is not None:
            record.end(operation, result.error)
        with self._lock:
            if self._making.pop(me, None) is None:
                raise ClosedError  # detached meanwhile: another process makes the part
            self.units.note(claim.unit, claim.part, root, result.error)
            while True:
                try:
                    self.ring.done(claim, result.records, spoiled=result.is_spoiled)
                    return
                except CommplanError as error:  # the claim is this process's until that has worked
                    LOG.warning("%s", error.diagnostics[0].message)


def _times() -> tuple[int, int] | None:
    """Microseconds for which the calling thread ran so far, and those for which it neither ran nor waited for
    a core, plus a constant; None if the kernel does not report them."""
    with contextlib.suppress(OSError, ValueError):
        ran, queued = map(int, _SCHEDSTAT.read_text().split()[:2])
        return ran // 1000, (time.perf_counter_ns() - ran - queued) // 1000
    return None
