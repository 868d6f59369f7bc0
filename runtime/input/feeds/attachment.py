"""This process in a feed: one opening of its ring for all members here, and the threads that make units."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from commplan.diagnostics import CommplanError, fail
from commplan.input.prefetch import KEEP
from commplan.runtime.input.feeds.facts import refuse_unlike
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.observe.wait_log import LOG
from commplan.runtime.input.ring import cursor, meeting
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.memory import ring as ring_bell
from commplan.runtime.input.ring.producers import Producers, Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import UnitProgram, Units, divisions_of, parts_of, units_of
from commplan.runtime.input.ring.words import ABSENT, MOST_SLOTS, Shape
from commplan.runtime.input.shm.slot_layout import slot_layout
from commplan.runtime.input.shm.slots import Slots
from commplan.wait import Wait, until

MEMBERS = 64
_MOST_CORES = 512
_END_S = 1.0  # seconds for threads to end in
_OPEN: dict[tuple[int, str], Attachment] = {}  # by process (a forked one has none of them) and title
_LEFT: list[Attachment] = []  # whose threads have yet to end
_COMER = -1  # among the members of an attachment, while one joins
os.register_at_fork(after_in_child=_LEFT.clear)


@atexit.register
def _leave_all() -> None:
    """The others need not find out that this process has ended."""
    for (process, _), attachment in list(_OPEN.items()):
        for member in list(attachment.members) if process == os.getpid() else ():
            attachment.leave(member)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a new feed. first: its first unit; ahead: units that are made ahead; makers: how many
    processes make units; cores: how many parts are in the making at a time."""

    first: int
    ahead: int
    makers: int
    cores: int


@dataclass(eq=False)
class Attachment:
    """A feed that this process has members in.

    idle: called now and then by a thread of it; drivers: the threads that last asked for batches of its
    members; record_lock: held while `recording` is changed.
    """

    name: str
    ring: Ring
    content: UnitProgram
    units: Units
    producers: Producers = field(init=False)
    recording: Recording = field(default_factory=Recording)
    members: set[int] = field(default_factory=set[int])
    drivers: dict[int, int] = field(default_factory=dict[int, int])
    idle: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    record_lock: threading.Lock = field(default_factory=threading.Lock)
    _forgotten: deque[tuple[int, Slots]] = field(default_factory=deque[tuple[int, Slots]])
    _leaving: threading.RLock = field(default_factory=threading.RLock)  # held while collected members leave

    def __post_init__(self) -> None:
        slots, name = self.ring.memory.mapped_slots(), f"commplan-{self.name}"
        self.producers = Producers(
            self.ring, self.units, slots, name, self.recording, self._close, self._look_after
        )

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
        for look in list(self.idle.values()):
            look()

    def _close(self) -> None:
        self.ring.leave()
        with contextlib.suppress(ValueError):
            _LEFT.remove(self)

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
        _OPEN.pop((os.getpid(), self.ring.memory.title), None)
        _LEFT.append(self)
        with self.record_lock:  # a thread that begins a record now sees that the feed has ended
            self.ring.retire()
            if self.recording.record is not None:
                self.recording.record.close()
        if self.ring.memory.descriptor < 0:  # its threads have ended before, of an error
            self._close()

    def leave(self, member: int) -> None:
        """Close the cursor of `member`; with the last one of this process its part in the feed ends."""
        self.leave_forgotten()
        with meeting.OPENING:
            if member not in self.members:
                return
            self.members.discard(member)
            self.idle.pop(member, None)
            cursor.leave(self.ring, member)
            if self.members:
                return
            self._end()
        self.producers.join(_END_S)  # the last of them leaves the ring: until then its parts stay claimed
        self.producers.detach()


@contextlib.contextmanager
def attached(
    name: str, facts: Mapping[str, str], plan: ClockPlan, content: UnitProgram, sizes: Sizes
) -> Generator[tuple[Attachment, bool]]:
    """The feed `name`, and whether it was begun just now; no other thread or process joins meanwhile.

    Raises:
        CommplanError: CP0922 for other facts, CP0923 if there is no memory, CP0928.
    """
    title = f"feed {name!r}"
    if (left := _OPEN.get((os.getpid(), title))) is not None:
        left.leave_forgotten()
    with _coming(title), meeting.meeting():
        attachment = _OPEN.get((os.getpid(), title))
        if attachment is not None:
            refuse_unlike(name, facts, attachment.ring.memory.facts(), plan)
            with attachment.kept():
                yield attachment, False
            return
        memory = _found(name, title)
        is_new = memory is None
        ring = Ring(memory or _created(name, title, facts, content, sizes))
        try:
            refuse_unlike(name, facts, ring.memory.facts(), plan)
            with ring.memory.locked():
                ring.join()
            attachment = Attachment(name, ring, content, units_of(content, ring.parts))
            yield attachment, is_new
            if not attachment.members:
                raise RuntimeError("no member joined the feed")
            _OPEN[os.getpid(), title] = attachment
            attachment.producers.start()
        except BaseException:
            _OPEN.pop((os.getpid(), title), None)
            for record in ring.cursors if ring.place >= 0 else ():
                if record.get("process") == ring.place + 1:
                    record.set(state=ABSENT, process=0)
            ring.leave()
            raise


@contextlib.contextmanager
def _coming(title: str) -> Generator[None]:
    """No other thread of this process joins or leaves a feed, and no thread from before has this one open:
    when it closes the file, this process would lose all its locks.

    Raises:
        CommplanError: CP0928 if such a thread does not end for a minute.
    """

    def late(waited: float) -> NoReturn:
        fail(
            "CP0928",
            f"this process has left {title}, and a thread of it has made a unit for {waited:.0f} s",
            "does a function of the plan, or a source, hang?",
        )

    def has_ended(seconds: float) -> bool:
        return not _is_open(title) or bool(time.sleep(min(seconds, 0.01)))

    while True:
        _ = until(has_ended, Wait(meeting.MEET_S, late))
        with meeting.OPENING:
            if not _is_open(title):  # else another thread has just left it
                yield
                return


def _is_open(title: str) -> bool:
    return any(attachment.ring.memory.title == title for attachment in list(_LEFT))


def _found(name: str, title: str) -> SharedMemory | None:
    candidates = (meeting.opened(candidate, title) for candidate in meeting.found(name))
    return next((memory for memory in candidates if memory is not None), None)


def _created(
    name: str, title: str, facts: Mapping[str, str], content: UnitProgram, sizes: Sizes
) -> SharedMemory:  # fmt: skip
    parts = parts_of(content.program, sizes.cores)
    slots = min(sizes.ahead + KEEP + min(sizes.cores, 4) - 1, MOST_SLOTS)
    nbytes = slot_layout(content.program, divisions_of(content.program, parts)).nbytes
    return meeting.created(
        name, title, Shape(slots, nbytes, parts, MEMBERS, MEMBERS), facts, epoch=content.epoch,
        unit=content.rows, cores=min(sizes.cores, _MOST_CORES), makers=sizes.makers, next=sizes.first,
    )  # fmt: skip


def place_of(attachment: Attachment, member: int | None, most: int) -> int:
    """The place of `member`, or the first free one if it is None. The caller holds the ring's lock.

    most: members that the plan has.

    Raises:
        CommplanError: CP0929 if it is taken, or all are.
    """
    ring = attachment.ring
    ring.reap()
    if member is not None:
        if ring.cursors[member].get("state"):
            fail(
                "CP0929",
                f"{ring.memory.title} has a member {member} already: process {ring.pid_of(member)}",
                "give each its own number, or none: then the first free one is taken",
            )
        return member
    places = range(min(most, MEMBERS))
    free = next((place for place in places if not ring.cursors[place].get("state")), None)
    if free is None:
        fail("CP0929", f"{ring.memory.title} has {most} members already, and the plan has no more")
    return free
