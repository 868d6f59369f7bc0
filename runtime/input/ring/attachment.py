"""This process at a ring: one opening for all members here, and the threads that make units."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from commplan.diagnostics import CommplanError
from commplan.runtime.input.observe.wait_log import LOG
from commplan.runtime.input.ring import cursor, meeting
from commplan.runtime.input.ring.memory import ring as ring_bell
from commplan.runtime.input.ring.producers import Producers, Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import UnitProgram, Units
from commplan.runtime.input.shm.slots import Slots

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from commplan.runtime.input.observe.overdue_calls import OverdueCalls
    from commplan.runtime.input.ring.carriage import Carriage
    from commplan.runtime.input.stages.worker_pool import Workers

_END_S = 1.0  # seconds for threads to end in
OPEN: list[Attachment] = []  # of this process
LEFT: list[Attachment] = []  # whose threads have yet to end
_COMER = -1  # among the members of an attachment, while one joins


def _forget_parent() -> None:
    OPEN.clear()
    LEFT.clear()


os.register_at_fork(after_in_child=_forget_parent)


@atexit.register
def _leave_all() -> None:
    """The others need not find out that this process has ended."""
    for attachment in list(OPEN):
        for member in list(attachment.members):
            attachment.leave(member)


class Member(Protocol):
    """A member of this process, as threads that make units and other members see it."""

    def let_go_if_idle(self) -> None:
        """Keep no units for it if it has not begun its next epoch for long."""
        ...

    def let_go(self) -> None:
        """Keep no units for it until it goes on. The calling thread drives it."""
        ...


@dataclass
class Driver:
    """The thread that opened a member, and the one that has asked for its last batch, if one has."""

    opener: threading.Thread
    thread: threading.Thread | None = None


@dataclass(eq=False)
class Attachment:
    """A ring that this process has members at.

    looks: return members that have not been collected. record_lock: held while `recording` is changed.
    workers: make the units instead of threads. carriage: moves units between hosts. calls: of user functions
    that do not return.
    """

    name: str
    ring: Ring
    content: UnitProgram
    units: Units
    workers: Workers | None = None
    carriage: Carriage | None = None
    calls: OverdueCalls | None = None
    recording: Recording = field(default_factory=Recording)
    producers: Producers = field(init=False)
    members: set[int] = field(default_factory=set[int])
    drivers: dict[int, Driver] = field(default_factory=dict[int, Driver])
    looks: dict[int, Callable[[], Member | None]] = field(
        default_factory=dict[int, "Callable[[], Member | None]"]
    )
    record_lock: threading.Lock = field(default_factory=threading.Lock)
    _pool: ThreadPoolExecutor | None = None
    _pool_threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _forgotten: deque[tuple[int, Slots]] = field(default_factory=deque[tuple[int, Slots]])
    _leaving: threading.RLock = field(default_factory=threading.RLock)  # held while collected members leave

    def __post_init__(self) -> None:
        slots, name = self.ring.memory.mapped_slots(), f"commplan-{self.name}"
        if self.workers is not None:
            self.workers.share(slots)
        self.producers = Producers(
            self.ring, self.units, slots, name, self.recording, self._close, self._look_after
        )

    def start(self) -> None:
        """Start the threads that make units, and the one that moves them between hosts."""
        OPEN.append(self)
        if self.carriage is not None:
            last = len(self.ring.cursors) - 1
            self.producers.begin(lambda: self.carriage and self.carriage.run(last), "carry")
        self.producers.start()

    def pool(self, threads: int) -> ThreadPoolExecutor:
        """Threads for what members do for themselves."""
        with self._leaving:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  few members need any

                name = f"commplan-{self.name}-own"
                self._pool = ThreadPoolExecutor(
                    threads, name, lambda: self._pool_threads.append(threading.current_thread())
                )
            return self._pool

    def forget(self, member: int, slots: Slots, process: int) -> None:
        """`member` was collected. A collector runs in any thread, whatever locks that has: another one does
        the rest."""
        if os.getpid() == process:
            self._forgotten.append((member, slots))
            ring_bell(self.ring.memory.bell("changed"))

    def leave_forgotten(self) -> None:
        """Let members that were collected leave; when it returns, they have left."""
        with self._leaving:
            while self._forgotten:
                member, slots = self._forgotten.popleft()
                try:
                    slots.close()
                except CommplanError as error:
                    title, reason = self.ring.memory.title, error.diagnostics[0].message
                    LOG.warning("arrays that are kept of %s may change: %s", title, reason)
                self.leave(member)

    def _look_after(self) -> None:
        if self._leaving.acquire(blocking=False):  # else another thread does it
            try:
                self.leave_forgotten()
            finally:
                self._leaving.release()
        for look in list(self.looks.values()):
            if (member := look()) is not None:
                member.let_go_if_idle()

    def _close(self) -> None:
        if self.workers is not None:
            self.workers.close()
        if self.carriage is not None:
            self.carriage.carrier.close()
        self.ring.leave()
        with contextlib.suppress(ValueError):
            LEFT.remove(self)

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """It does not end while this runs, whichever members leave: a collector may find one anywhere."""
        self.members.add(_COMER)
        try:
            yield
        finally:
            self.members.discard(_COMER)
            if not self.members:
                self._end()

    def _end(self) -> None:
        """The last member of this process has left."""
        with contextlib.suppress(ValueError):
            OPEN.remove(self)
        LEFT.append(self)
        with self.record_lock:  # a thread that begins a record now sees that the ring has ended
            self.ring.retire()
            if self.recording.record is not None:
                self.recording.record.close()
        if self.workers is not None:
            self.workers.stop()
        if self.carriage is not None:
            self.carriage.carrier.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self.ring.memory.descriptor < 0:  # its threads have ended before, of an error
            self._close()

    def discard(self) -> None:
        """End before a member has joined."""
        self.ring.retire()
        if self.producers.running:
            self._end()
        else:
            self._close()

    def leave(self, member: int) -> None:
        """Close the cursor of `member`; with the last one of this process its part in the ring ends."""
        self.leave_forgotten()
        with meeting.OPENING:
            if member not in self.members:
                return
            self.members.discard(member)
            self.looks.pop(member, None)
            self.drivers.pop(member, None)
            cursor.leave(self.ring, member)
            if self.members:
                return
            self._end()
        for thread in self._pool_threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)
        self.producers.join(_END_S)  # the last of them leaves the ring: until then its parts stay claimed
        self.producers.detach()
