"""The status of this user's feeds on this host, read from their rings without joining them."""

from __future__ import annotations

import time

import msgspec

from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.waiting import blocked_by
from commplan.runtime.input.ring.words import HOLDS


class MemberStatus(msgspec.Struct, frozen=True):
    """The status of a member.

    Attributes:
        member: the number of the member.
        pid: the PID of its process.
        batch: the number of records in a batch.
        epoch: the current epoch.
        place: the number of records from the start of epoch 0 to the first one that it has not released.
        records: the number of records that it has received.
        rate: received records per second since it joined.
        waited_s: the total time of its waits in seconds.
        waits_for: the process or member that blocks its current wait, in words; "" if it does not wait.
        alone: the number of units that it has made itself, because they were no longer in the ring.
        is_held: whether units are kept for it.
    """

    member: int
    pid: int
    batch: int
    epoch: int
    place: int
    records: int
    rate: float
    waited_s: float
    waits_for: str
    alone: int
    is_held: bool


class FeedStatus(msgspec.Struct, frozen=True):
    """The status of a feed.

    Attributes:
        name: the name of the feed.
        plan: the name of the plan.
        phase: the name of the phase.
        unit: the number of records in a unit.
        slots: the number of slots, each with the memory of a unit.
        nbytes: the size of the memory in bytes.
        made: the records that each process with a member has made, in units rounded up, by PID.
        members: the members with a living process, by number.
    """

    name: str
    plan: str
    phase: str
    unit: int
    slots: int
    nbytes: int
    made: dict[int, int]
    members: tuple[MemberStatus, ...]


def feeds() -> list[FeedStatus]:
    """Return the feeds with a living member, sorted by name."""
    statuses: list[FeedStatus] = []
    for candidate in meeting.memory_files():
        with meeting.visited(candidate, f"feed {candidate.name!r}") as memory:
            if memory is not None:
                statuses.append(_status(candidate.name, Ring(memory)))
    return sorted((status for status in statuses if status.members), key=lambda status: status.name)


def _status(name: str, ring: Ring) -> FeedStatus:
    """The status of the feed `name`."""
    shape = ring.memory.shape
    unit = ring.header.get("unit")
    facts = ring.memory.facts()
    owners = {member: record.get("process") - 1 for member, record in enumerate(ring.cursors)}
    alive = [
        member
        for member, process in owners.items()
        if ring.cursors[member].get("state") and ring.memory.lives(process)
    ]
    makers = [ring.processes[process] for process in sorted({owners[member] for member in alive})]
    units = {maker.get("pid"): -(-maker.get("records") // unit) for maker in makers}
    members = tuple(_member(ring, member) for member in alive)
    plan = facts.get("the plan", "").partition(" ")[0]
    return FeedStatus(name, plan, facts.get("phase", ""), unit, shape.slots, shape.nbytes, units, members)


def _member(ring: Ring, member: int) -> MemberStatus:
    """The status of `member`, whose process is alive."""
    record, unit = ring.cursors[member], ring.header.get("unit")
    lasted_s = max(1e-9, _seconds_since(record.get("since")))  # not 0: it divides `rate`
    awaited = record.get("wanted")
    waited_s = record.get("waited_ns") / 1e9
    if awaited:
        waited_s += _seconds_since(record.get("waits_since"))
    position = record.get("position")
    return MemberStatus(
        member, ring.pid_of(member), record.get("batch"), position // ring.header.get("epoch"),
        position * unit, record.get("records"), record.get("records") / lasted_s, waited_s,
        blocked_by(ring, awaited - 1) if awaited else "", record.get("private"),
        record.get("state") == HOLDS,
    )  # fmt: skip


def _seconds_since(ns: int) -> float:
    """The seconds since a time of `time.monotonic_ns`."""
    return (time.monotonic_ns() - ns) / 1e9
