"""How a process joins a feed: it finds the ring by the feed's name, or creates it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from commplan.diagnostics import fail
from commplan.input.prefetch import KEEP
from commplan.runtime.input.feeds.facts import refuse_unlike
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.attachment import LEFT, OPEN, Attachment
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import UnitProgram, layout_of, parts_of, units_of
from commplan.runtime.input.ring.words import ABSENT, MOST_SLOTS, Shape
from commplan.wait import Wait, until

MEMBERS = 64
_MOST_CORES = 512


@dataclass(frozen=True)
class Sizes:
    """The sizes of a new feed. first: its first unit; ahead: units that are made ahead; makers: how many
    processes make units; cores: how many parts are in the making at a time."""

    first: int
    ahead: int
    makers: int
    cores: int


@contextlib.contextmanager
def attached(
    name: str, facts: Mapping[str, str], plan: ClockPlan, content: UnitProgram, sizes: Sizes
) -> Generator[tuple[Attachment, bool]]:
    """The feed `name`, and whether it was begun just now; no other thread or process joins meanwhile.

    Raises:
        CommplanError: CP0922 for other facts, CP0923 if there is no memory, CP0928.
    """
    title = f"feed {name!r}"
    if (left := _opened(title)) is not None:
        left.leave_forgotten()
    with _coming(title), meeting.meeting():
        attachment = _opened(title)
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
            attachment = Attachment(
                name, ring, content, units_of(content, layout_of(content.program, ring.parts))
            )
            yield attachment, is_new
            if not attachment.members:
                raise RuntimeError("no member joined the feed")
            attachment.start()
        except BaseException:
            if (attachment := _opened(title)) is not None:
                OPEN.remove(attachment)
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


def _opened(title: str) -> Attachment | None:
    """The feed with this title that this process has members in."""
    return next((attachment for attachment in list(OPEN) if attachment.ring.memory.title == title), None)


def _is_open(title: str) -> bool:
    return any(attachment.ring.memory.title == title for attachment in list(LEFT))


def _found(name: str, title: str) -> SharedMemory | None:
    candidates = (meeting.opened(candidate, title) for candidate in meeting.found(name))
    return next((memory for memory in candidates if memory is not None), None)


def _created(
    name: str, title: str, facts: Mapping[str, str], content: UnitProgram, sizes: Sizes
) -> SharedMemory:  # fmt: skip
    parts = parts_of(content.program, sizes.cores)
    slots = min(sizes.ahead + KEEP + min(sizes.cores, 4) - 1, MOST_SLOTS)
    nbytes = layout_of(content.program, parts).nbytes
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
