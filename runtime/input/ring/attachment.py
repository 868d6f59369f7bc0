"""The attachment of a process to a ring, shared by its members, with the threads that make units.

Feeds and members with separate clocks use it. Processes of a group that take all batches together use
`GroupExchange` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from commplan.diagnostics import CommplanError
from commplan.runtime.input.observe.wait_log import log_warning
from commplan.runtime.input.ring import cursor, meeting
from commplan.runtime.input.ring.memory import ring_bell
from commplan.runtime.input.ring.producers import Producers, Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import UnitProgram, Units
from commplan.runtime.input.shm.slots import Slots

if TYPE_CHECKING:
    from commplan.runtime.input.observe.overdue_calls import OverdueCalls
    from commplan.runtime.input.ring.carriage import Carriage
    from commplan.runtime.input.stages.stage_threads import StageThreads
    from commplan.runtime.input.stages.worker_pool import Workers

_END_S = 1.0  # seconds to wait for each thread to end
OPEN: list[Attachment] = []  # open attachments of this process
LEFT: list[Attachment] = []  # closed attachments whose threads are still running
_JOINING = -1  # a placeholder in `Attachment.members` while a member joins


os.register_at_fork(after_in_child=lambda: (OPEN.clear(), LEFT.clear()))


@atexit.register
def _leave_all() -> None:
    """Leave all rings, so that other processes need not detect the end of this one."""
    for attachment in list(OPEN):
        for member in list(attachment.members):
            attachment.leave(member)


class Member(Protocol):
    """The interface of a member (`RingMember`) for other threads of its process."""

    def let_go_if_idle(self) -> None:
        """Stop keeping units for this member if it has been between two epochs for too long."""
        ...

    def let_go(self) -> None:
        """Stop keeping units for this member until its next batch. The calling thread drives the member."""
        ...


@dataclass
class Driver:
    """The threads that drive a member.

    Attributes:
        opener: the thread that opened the member.
        thread: the thread that requested its last batch; None before the first one.
    """

    opener: threading.Thread
    thread: threading.Thread | None = None


@dataclass(eq=False)
class Attachment:
    """A ring that members of this process read.

    Attributes:
        name: the name of the ring in the names of threads.
        ring: the ring, which this process has joined.
        content: the program of the units.
        units: makes the units.
        workers: worker processes that make the units; None if threads do.
        carriage: moves units between hosts; None if there is one host.
        calls: detects user functions that do not return; None without this check.
        recording: the record of this process's run.
        producers: the threads that make units.
        members: the numbers of the members of this process, and -1 while one joins a running attachment.
        drivers: the driver of each member, by number.
        looks: a weak reference to each member, by number.
        record_lock: held while `recording` is changed.
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
    _stage_threads: StageThreads | None = None
    _forgotten: deque[tuple[int, Slots]] = field(default_factory=deque[tuple[int, Slots]])
    _leaving: threading.RLock = field(default_factory=threading.RLock)  # held while collected members leave

    def __post_init__(self) -> None:
        slots, name = self.ring.memory.mapped_slots(), f"commplan-{self.name}"
        if self.workers is not None:
            self.workers.share(slots)
        self.producers = Producers(
            self.ring, self.units, slots, name, self.recording, self._close, self._maintain
        )

    def start(self) -> None:
        """Start the threads that make units and the thread that moves them between hosts."""
        OPEN.append(self)
        if self.carriage is not None:
            advance = functools.partial(self.carriage.advance, len(self.ring.cursors) - 1)
            self.producers.begin_once(functools.partial(self.carriage.run, advance), "carry")
        self.producers.start()

    def stage_threads(self, most: int) -> StageThreads:
        """The threads for the stages that members run themselves.

        The first call creates them. `most` is the number of threads; later calls ignore it.
        """
        with self._leaving:
            if self._stage_threads is None:
                from commplan.runtime.input.stages import stage_threads  # noqa: PLC0415  few members need any

                self._stage_threads = stage_threads.StageThreads(most, f"commplan-{self.name}-own")
            return self._stage_threads

    def forget(self, member: int, slots: Slots, process: int) -> None:
        """Schedule the departure of a garbage-collected member.

        The garbage collector can run in any thread, which may hold locks, so another thread completes the
        departure.

        Args:
            member: the number of the member.
            slots: its mapping of the slots.
            process: the PID of the process that created the member.
        """
        if os.getpid() == process:
            self._forgotten.append((member, slots))
            ring_bell(self.ring.memory.bell("changed"))

    def leave_forgotten(self) -> None:
        """Complete the departure of all garbage-collected members."""
        with self._leaving:
            while self._forgotten:
                member, slots = self._forgotten.popleft()
                try:
                    slots.close()
                except CommplanError as error:
                    title, reason = self.ring.memory.title, error.diagnostics[0].message
                    log_warning("arrays of %s that the program still holds may change: %s", title, reason)
                self.leave(member)

    def _maintain(self) -> None:
        """Complete departures and release units of idle members. The supervisor of `producers` calls this."""
        if self._leaving.acquire(blocking=False):  # otherwise another thread does it
            try:
                self.leave_forgotten()
            finally:
                self._leaving.release()
        for look in list(self.looks.values()):
            if (member := look()) is not None:
                member.let_go_if_idle()

    def _close(self) -> None:
        """Leave the ring, after the last thread has ended."""
        if self.workers is not None:
            self.workers.close()
        if self.carriage is not None:
            self.carriage.carrier.close()
        self.ring.leave()
        with contextlib.suppress(ValueError):
            LEFT.remove(self)

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Keep the attachment open, even if all of its members are collected during the block."""
        self.members.add(_JOINING)
        try:
            yield
        finally:
            self.members.discard(_JOINING)
            if not self.members:
                self._end()

    def _end(self) -> None:
        """End the attachment after the last member of this process has left."""
        with contextlib.suppress(ValueError):
            OPEN.remove(self)
        LEFT.append(self)
        with self.record_lock:  # a thread that begins a record after this finds the ring stopped
            self.ring.retire()
            if self.recording.record is not None:
                self.recording.record.close()
        if self.workers is not None:
            self.workers.stop()
        if self.carriage is not None:
            self.carriage.carrier.stop()
        if self._stage_threads is not None:
            self._stage_threads.close()
        if self.ring.memory.descriptor < 0:  # its threads have already ended with an error
            self._close()

    def discard(self) -> None:
        """End the attachment before a member has joined."""
        self.ring.retire()
        if self.producers.running:
            self._end()
        else:
            self._close()

    def leave(self, member: int) -> None:
        """Close the cursor of `member`. The attachment ends with the last member of this process."""
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
        for thread in self._stage_threads.running if self._stage_threads is not None else ():
            if thread is not threading.current_thread():
                thread.join(_END_S)
        self.producers.join(_END_S)  # the last thread leaves the ring; until then its parts stay claimed
        self.producers.detach()
