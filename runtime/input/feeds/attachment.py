"""This process in a feed: one opening of its memory for all members here, and the threads that make
units."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NoReturn

from commplan.diagnostics import CommplanError, fail
from commplan.input.prefetch import KEEP
from commplan.runtime.input.feeds import directory
from commplan.runtime.input.feeds.facts import refuse_unlike
from commplan.runtime.input.feeds.layout import MEMBERS, MOST_SLOTS, NBYTES
from commplan.runtime.input.feeds.maker import MakerThreads, UnitMaker
from commplan.runtime.input.feeds.memory import Facts, FeedMemory
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.observe.wait_log import LOG
from commplan.runtime.input.shm.slots import Slots
from commplan.wait import Wait, until

_END_S = 1.0  # seconds for threads to end in
_COMING = threading.RLock()  # held by who joins or leaves a feed in this process
_OPEN: dict[tuple[int, str], Attachment] = {}  # by process (a forked one has none of them) and name
_LEFT: list[FeedMemory] = []  # that threads which have yet to end have open
_COMER = -1  # among the members of an attachment, while one comes
os.register_at_fork(after_in_child=_LEFT.clear)


@atexit.register
def _leave_all() -> None:
    """The others need not find out that this process has ended."""
    for (process, _), attachment in list(_OPEN.items()):
        for member in list(attachment.members) if process == os.getpid() else ():
            attachment.leave(member)


@dataclass(eq=False)
class Attachment:
    """A feed that this process has members in. idle: called now and then by a thread of it; drivers: the
    threads that last asked for batches of its members; recording: held by who begins its record."""

    memory: FeedMemory
    maker: UnitMaker
    threads: MakerThreads = field(init=False)
    members: set[int] = field(default_factory=set[int])
    drivers: dict[int, int] = field(default_factory=dict[int, int])
    idle: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    recording: threading.Lock = field(default_factory=threading.Lock)
    _forgotten: deque[tuple[int, Slots]] = field(default_factory=deque[tuple[int, Slots]])

    def __post_init__(self) -> None:
        name = self.memory.facts.name
        self.threads = MakerThreads(
            self.memory, self.maker, self.slots(), f"commplan-{name}", self._close, self._look_after
        )

    def slots(self) -> Slots:
        """The slots as one more taker maps them."""
        header = self.memory.header
        return Slots(self.memory.descriptor, NBYTES, header.get("slot_nbytes"), self.memory.slots)

    def forget(self, member: int, slots: Slots, process: int) -> None:
        """`member` was collected. A collector runs in any thread, whatever locks that has: another one does
        the rest."""
        if os.getpid() == process:
            self._forgotten.append((member, slots))
            self.memory.ring("seats")

    def leave_forgotten(self) -> None:
        """Members that were collected are there no more."""
        while True:
            try:
                member, slots = self._forgotten.popleft()
            except IndexError:
                return
            try:
                slots.close()
            except CommplanError as error:
                name = self.memory.facts.name
                LOG.warning("what is kept of feed %r may change: %s", name, error.diagnostics[0].message)
            self.leave(member)

    def _look_after(self) -> None:
        self.leave_forgotten()
        for look in list(self.idle.values()):
            look()

    def _close(self) -> None:
        self.memory.close()
        with contextlib.suppress(ValueError):
            _LEFT.remove(self.memory)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """It does not end while this runs, whoever leaves: a collector may find a member anywhere."""
        self.members.add(_COMER)
        try:
            yield
        finally:
            self.members.discard(_COMER)
            if not self.members:
                self._end()

    def _end(self) -> None:
        """The last member of this process has left."""
        memory = self.memory
        _OPEN.pop((os.getpid(), memory.facts.name), None)
        _LEFT.append(memory)
        with self.recording:  # whoever begins a record now sees that it has ended
            memory.stopped = True
            if self.threads.record is not None:
                self.threads.record.close()
        memory.leave_seats()
        memory.ring("taken", "made", "seats")
        if memory.descriptor < 0:  # its threads have ended before, of an error
            self._close()

    def leave(self, member: int) -> None:
        """`member` is there no more; with the last one of this process its part in the feed ends."""
        self.leave_forgotten()
        with _COMING:
            if member not in self.members:
                return
            self.members.discard(member)
            self.idle.pop(member, None)
            memory = self.memory
            memory.members[member].set("state", 0)
            memory.unlock_member(member)
            memory.ring("taken", "made", "seats")
            if self.members:
                return
            self._end()
        self.threads.join(_END_S)  # the last of them closes the file: until then nobody makes its unit anew
        try:
            self.threads.let_go()
        except OSError as error:
            LOG.warning("feed %r waits for a thread of this process: %s", memory.facts.name, error.strerror)
        memory.ring("taken", "made", "seats")


@contextlib.contextmanager
def attached(
    facts: Facts, plan: ClockPlan, maker: UnitMaker, *, first: int, ahead: int, readers: int, cores: int
) -> Generator[tuple[Attachment, bool]]:
    """The feed that is called as `facts` say, and whether it was begun just now, with unit `first`; nobody
    else comes or goes meanwhile. Errors: CP0922 for other facts, CP0923 no memory, CP0928."""
    name = facts.name
    if (left := _OPEN.get((os.getpid(), name))) is not None:
        left.leave_forgotten()
    with _coming(name), directory.meeting():
        attachment = _OPEN.get((os.getpid(), name))
        if attachment is not None:
            refuse_unlike(facts, attachment.memory.facts, plan)
            with attachment.held():
                yield attachment, False
            return
        memory = _found(name)
        begun = memory is None
        if memory is None:
            memory = _made(facts, maker, first=first, ahead=ahead, readers=readers, cores=cores)
        try:
            refuse_unlike(facts, memory.facts, plan)
            with memory.locked():
                memory.lock_process()
            attachment = Attachment(memory, maker)
            yield attachment, begun
        except BaseException:
            memory.stopped = True
            memory.close()
            raise
        if not attachment.members:
            raise RuntimeError("nobody came to the feed")
        _OPEN[os.getpid(), name] = attachment
        try:
            attachment.threads.start()
        except CommplanError:
            for member in attachment.members:
                memory.members[member].set("state", 0)
            del _OPEN[os.getpid(), name]
            memory.stopped = True
            memory.close()
            raise


@contextlib.contextmanager
def _coming(name: str) -> Generator[None]:
    """Nobody else in this process joins or leaves a feed, and no thread from before has feed `name` open:
    when it closes the file, this process would lose all its locks.

    Errors: CP0928 where such a thread does not end for a minute.
    """

    def late(waited: float) -> NoReturn:
        fail(
            "CP0928",
            f"this process has left feed {name!r}, and a thread of it has made a unit for {waited:.0f} s",
            "does a function of the plan, or a source, hang?",
        )

    def has_ended(seconds: float) -> bool:
        return not _open_still(name) or bool(time.sleep(min(seconds, 0.01)))

    while True:
        _ = until(has_ended, Wait(directory.MEET_S, late))
        with _COMING:
            if not _open_still(name):  # else another thread has just left it
                yield
                return


def _open_still(name: str) -> bool:
    return any(memory.facts.name == name for memory in list(_LEFT))


@contextlib.contextmanager
def looked_at(candidate: directory.Found) -> Generator[FeedMemory | None]:
    """The memory of a feed, which nobody in this process joins or leaves meanwhile; None where it is none.

    Where this process has it open that is it: to open it and close it again would let go of its locks.
    """
    with _COMING:
        mine = [*(attachment.memory for attachment in _OPEN.values()), *_LEFT]
        memory = next((each for each in mine if each.key == candidate.key), None)
        if memory is not None:
            yield memory
            return
        memory = FeedMemory.opened(candidate.path, candidate.key)
        try:
            yield memory
        finally:
            if memory is not None:
                memory.close()


def _found(name: str) -> FeedMemory | None:
    for candidate in directory.found(name):
        memory = FeedMemory.opened(candidate.path, candidate.key)
        if memory is not None:
            return memory
    return None


def _made(
    facts: Facts, maker: UnitMaker, *, first: int, ahead: int, readers: int, cores: int
) -> FeedMemory:  # fmt: skip
    slots, each = min(ahead + KEEP + min(cores, 4) - 1, MOST_SLOTS), maker.layout.nbytes
    nbytes = NBYTES + slots * each
    try:
        descriptor = directory.fresh(facts.name, nbytes)
    except OSError as error:
        fail(
            "CP0923",
            f"{nbytes} bytes of shared memory cannot be had: {error.strerror}",
            "make the batch or `prefetch` smaller",
        )
    status = os.fstat(descriptor)
    memory = FeedMemory(descriptor, (status.st_dev, status.st_ino), facts)
    memory.lay_out(
        cores=cores, slots=slots, slot_nbytes=each, epoch=maker.epoch, readers=readers, first=first
    )
    return memory


def place_of(attachment: Attachment, member: int | None, most: int) -> int:
    """Take the place of `member`, or the first free one where it is None (under the feed's lock).

    most: members that the plan has. Errors: CP0929 where it is taken, or all are.
    """
    memory = attachment.memory
    memory.reap()
    if member is not None:
        if not memory.lock_member(member):
            holder = memory.members[member].get("pid")
            fail(
                "CP0929",
                f"feed {memory.facts.name!r} has a member {member} already: process {holder}",
                "give each its own number, or none: then the first free one is taken",
            )
        return member
    taken = next((place for place in range(min(most, MEMBERS)) if memory.lock_member(place)), None)
    if taken is None:
        fail("CP0929", f"feed {memory.facts.name!r} has {most} members already, and the plan has no more")
    return taken
