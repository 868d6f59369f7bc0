"""This process in a feed: one opening of its memory for all members here, and the threads that make
units."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from commplan.diagnostics import fail
from commplan.input.prefetch import KEEP
from commplan.runtime.input.feeds import directory
from commplan.runtime.input.feeds.facts import refuse_unlike
from commplan.runtime.input.feeds.maker import MakerThreads, UnitMaker
from commplan.runtime.input.feeds.memory import MEMBERS, MOST_SLOTS, NBYTES, Facts, FeedMemory
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.shm.slots import Slots

_END_S = 1.0  # seconds for threads to end in
_COMING = threading.RLock()  # held by who joins or leaves a feed in this process
_OPEN: dict[tuple[int, str], Attachment] = {}  # by process (a forked one has none of them) and name


@dataclass(eq=False)
class Attachment:
    """A feed that this process has members in. idle: called now and then by a thread of it; drivers: the
    threads that last asked for batches of its members."""

    memory: FeedMemory
    maker: UnitMaker
    threads: MakerThreads = field(init=False)
    members: set[int] = field(default_factory=set[int])
    drivers: dict[int, int] = field(default_factory=dict[int, int])
    idle: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])

    def __post_init__(self) -> None:
        name = self.memory.facts.name
        self.threads = MakerThreads(
            self.memory, self.maker, self.slots(), f"commplan-{name}", self.memory.close, self._look_after
        )

    def slots(self) -> Slots:
        """The slots as one more taker maps them."""
        header = self.memory.header
        return Slots(self.memory.descriptor, NBYTES, header.get("slot_nbytes"), self.memory.slots)

    def _look_after(self) -> None:
        for look in list(self.idle.values()):
            look()

    def leave(self, member: int) -> None:
        """`member` is there no more; with the last one of this process its part in the feed ends."""
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
            _OPEN.pop((os.getpid(), memory.facts.name), None)
            memory.stopped = True
            memory.ring("taken", "made", "seats")
        self.threads.join(_END_S)  # the last of them closes the file: until then nobody makes its unit anew


@contextlib.contextmanager
def attached(
    facts: Facts, plan: ClockPlan, maker: UnitMaker, *, first: int, ahead: int, readers: int, cores: int
) -> Generator[tuple[Attachment, bool]]:
    """The feed that is called as `facts` say, and whether it was begun just now, with unit `first`; nobody
    else comes or goes meanwhile. Errors: CP0922 for other facts, CP0923 no memory, CP0928."""
    name = facts.name
    with _COMING, directory.meeting():
        attachment = _OPEN.get((os.getpid(), name))
        if attachment is not None:
            refuse_unlike(facts, attachment.memory.facts, plan)
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
        attachment.threads.start()


def own(key: tuple[int, int]) -> FeedMemory | None:
    """The memory that this process has open: to open and close it again would let go of its locks."""
    return next((a.memory for a in list(_OPEN.values()) if a.memory.key == key), None)


def _found(name: str) -> FeedMemory | None:
    for candidate in directory.found(name):
        memory = FeedMemory.opened(candidate.path, candidate.key)
        if memory is not None:
            return memory
    return None


def _made(
    facts: Facts, maker: UnitMaker, *, first: int, ahead: int, readers: int, cores: int
) -> FeedMemory:  # fmt: skip
    slots, each = min(ahead + KEEP + min(cores, 4), MOST_SLOTS), maker.layout.nbytes
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
