"""Joining a feed: a process finds the ring by the name of the feed, or creates it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from commplan.diagnostics import fail
from commplan.input.prefetch import KEEP
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.attachment import LEFT, OPEN, Attachment
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import UnitProgram, layout_of, parts_of, units_of
from commplan.runtime.input.ring.words import ABSENT, MOST_SLOTS, Shape
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.sources.content_keys import source_digest, source_key
from commplan.wait import Wait, until

MEMBERS = 64  # the most members of a feed, and the most processes
_MOST_CORES = 512  # the most parts of a feed that may be in progress
_MOST_STARTED = 4  # the most units in progress for which a feed has slots


@dataclass(frozen=True)
class Sizes:
    """The sizes of a new feed.

    Attributes:
        first: the first unit of the member that creates the feed.
        ahead: the number of units that are made ahead.
        makers: the most processes that make units at a time.
        cores: the most parts in progress.
    """

    first: int
    ahead: int
    makers: int
    cores: int


@contextlib.contextmanager
def attached(
    name: str, facts: Mapping[str, str], plan: ClockPlan, content: UnitProgram, sizes: Sizes
) -> Generator[tuple[Attachment, bool]]:
    """Open or create a feed, and exclude other threads and processes from joining during the block.

    Args:
        name: the name of the feed.
        facts: the result of `facts_of` for this process; it must be equal to that of the feed.
        plan: the schedules of the members.
        content: the program of the units.
        sizes: the sizes, if the feed is created.

    Yields:
        The attachment of this process, and whether the feed was created.

    Raises:
        CommplanError: CP0922 if the facts differ, CP0923 if there is no memory, CP0928 if another process or
            thread blocks the join or the feed has no free place for a process.
        RuntimeError: if no member joins during the block.
    """
    title = f"feed {name!r}"
    if (forgotten := _open_attachment(title)) is not None:
        forgotten.leave_forgotten()
    with _other_threads_excluded(title), meeting.exclusive():
        attachment = _open_attachment(title)
        if attachment is not None:
            _refuse_unlike(name, facts, attachment.ring.memory.facts(), plan)
            with attachment.kept():
                yield attachment, False
            return
        memory = _find_memory(name, title)
        is_new = memory is None
        ring = Ring(memory or _create_memory(name, title, facts, content, sizes))
        try:
            _refuse_unlike(name, facts, ring.memory.facts(), plan)
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
            # `Attachment.start` lists the attachment before it can fail.
            if (attachment := _open_attachment(title)) is not None:
                OPEN.remove(attachment)
            for record in ring.cursors if ring.place >= 0 else ():
                if record.get("process") == ring.place + 1:
                    record.set(state=ABSENT, process=0)
            ring.leave()
            raise


@contextlib.contextmanager
def _other_threads_excluded(title: str) -> Generator[None]:
    """Exclude other threads of this process from joining and leaving feeds during the block.

    First wait for threads of an earlier attachment to this feed, because this process would lose all of its
    locks when they close the file.

    Raises:
        CommplanError: CP0928 if such a thread does not end within `meeting.MEET_S`.
    """

    def late(waited: float) -> NoReturn:
        fail(
            "CP0928",
            f"this process has left {title}, and a thread of it has made a unit for {waited:.0f} s",
            "does a function of the plan, or a source, hang?",
        )

    def has_ended(seconds: float) -> bool:
        return not _has_threads(title) or bool(time.sleep(min(seconds, 0.01)))

    while True:
        _ = until(has_ended, Wait(meeting.MEET_S, late))
        with meeting.OPENING:
            if not _has_threads(title):  # otherwise another thread has just left the feed
                yield
                return


def _open_attachment(title: str) -> Attachment | None:
    """The attachment of this process to the feed with this title, if any."""
    return next((attachment for attachment in list(OPEN) if attachment.ring.memory.title == title), None)


def _has_threads(title: str) -> bool:
    """Whether threads of a former attachment to the feed with this title are still running."""
    return any(attachment.ring.memory.title == title for attachment in list(LEFT))


def _find_memory(name: str, title: str) -> SharedMemory | None:
    """Open the memory of a running feed; None if there is none."""
    candidates = (meeting.opened(candidate, title) for candidate in meeting.memory_files(name))
    return next((memory for memory in candidates if memory is not None), None)


def _create_memory(
    name: str, title: str, facts: Mapping[str, str], content: UnitProgram, sizes: Sizes
) -> SharedMemory:  # fmt: skip
    """Create the memory of a feed. Raises as `meeting.created`."""
    parts = parts_of(content.program, sizes.cores)
    # The units that are made ahead, those that arrays of a member reference, and further ones in progress.
    slots = min(sizes.ahead + KEEP + min(sizes.cores, _MOST_STARTED) - 1, MOST_SLOTS)
    nbytes = layout_of(content.program, parts).nbytes
    return meeting.created(
        name, title, Shape(slots, nbytes, parts, MEMBERS, MEMBERS), facts, epoch=content.epoch,
        unit=content.rows, cores=min(sizes.cores, _MOST_CORES), makers=sizes.makers, next=sizes.first,
    )  # fmt: skip


def check_member(plan: ClockPlan, member: object) -> int:
    """Check the number of a member. None, for the first free one, is valid.

    Returns:
        The most members that the feed can have.

    Raises:
        CommplanError: CP0929 if the plan or its feed has no such member.
    """
    size = plan.schedule.axis(plan.clock).size
    most = min(size, MEMBERS)
    if member is None or (hasattr(member, "__index__") and member in range(most)):
        return most
    expected = f"its members are 0 to {most - 1}"
    if hasattr(member, "__index__") and member in range(size):
        problem = f"a feed has at most {MEMBERS} members, so it has no member {member!r}"
        return fail("CP0929", problem, f"{expected}; `{plan.clock}` has {size}")
    return fail("CP0929", f"`{plan.clock}` has no member {member!r}", expected)


def place_of(attachment: Attachment, member: int | None, most: int) -> int:
    """Choose the place of a member. The caller holds the ring's lock.

    Args:
        attachment: the attachment to the feed.
        member: the number of the member, below `most`; None for the first free place.
        most: the result of `check_member`.

    Returns:
        The place: the number of the member and of its cursor.

    Raises:
        CommplanError: CP0929 if the place is in use, or if no place is free.
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
    free = next((place for place in range(most) if not ring.cursors[place].get("state")), None)
    if free is None:
        limit = "the plan has no more" if most < MEMBERS else "a feed can have no more"
        fail("CP0929", f"{ring.memory.title} has {most} members already, and {limit}")
    return free


def facts_of(
    plan: ClockPlan, content: UnitProgram, sources: Mapping[str, Source],
    passed_sources: Mapping[str, object], functions: Mapping[str, Callable[..., Any]],
) -> dict[str, str]:  # fmt: skip
    """Describe everything that determines the units of a feed, without the members' private work.

    Args:
        plan: the schedules of the members.
        content: the program of the units.
        sources: the sources by name.
        passed_sources: the sources as passed by the user, which may have an attribute `key`.
        functions: the functions by name.

    Returns:
        Descriptions by subject, both in words for messages.
    """
    schedule = plan.schedule
    facts = {
        "the plan": f"{schedule.plan} {schedule.plan_digest}",
        "phase": plan.phase,
        "the unit": f"{content.rows} records",
    }
    for name in sorted({read.source for flow in content.program.flows for read in flow.reads}):
        key = source_key(name, passed_sources.get(name))
        facts[f"source `{name}`"] = f"{len(sources[name])} records" + (f", key {key}" if key else "")
    for name in sorted(fn.name for fn in schedule.fns if fn.name in content.called):
        facts[f"function `{name}`"] = f"source {source_digest(functions[name])}"
    return facts


def _refuse_unlike(
    name: str, member_facts: Mapping[str, str], feed_facts: Mapping[str, str], plan: ClockPlan
) -> None:
    """Check that this process agrees with a feed on its facts.

    Args:
        name: the name of the feed.
        member_facts: the facts of this process.
        feed_facts: the facts of the feed.
        plan: the schedules of the members.

    Raises:
        CommplanError: CP0922 if the facts differ.
    """
    if member_facts == feed_facts:
        return
    fail(
        "CP0922",
        f"feed {name!r} was begun with something else than this process brings",
        *(
            f"{subject}: {member_facts[subject]} here, {feed_facts[subject]} there"
            for subject in member_facts
            if feed_facts.get(subject, member_facts[subject]) != member_facts[subject]
        ),
        "give it what the others have, or a name of its own",
        span=plan.schedule.phase(plan.phase).span,
        file=plan.schedule.file,
    )
