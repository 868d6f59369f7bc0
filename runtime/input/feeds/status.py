"""What runs on this host: the feeds of this user, as their own words say."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from commplan.runtime.input.feeds import directory
from commplan.runtime.input.feeds.attachment import looked_at
from commplan.runtime.input.feeds.layout import HOLDS, NBYTES
from commplan.runtime.input.feeds.memory import FeedMemory


class MemberStatus(msgspec.Struct, frozen=True):
    """One member. place: records from the first of epoch 0. rate: records a second since it came. waits_for:
    whom it waits for now, in words; empty where it waits for nobody. alone: units that it read by itself.
    is_held: whether units are kept for it."""

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
    """One feed. nbytes: of its memory. made: units that each process has made, by its number."""

    name: str
    plan: str
    phase: str
    unit: int
    slots: int
    nbytes: int
    made: dict[int, int]
    members: tuple[MemberStatus, ...]


def feeds() -> list[FeedStatus]:
    """The feeds in which somebody lives, by name."""
    statuses: list[FeedStatus] = []
    for candidate in directory.found():
        with looked_at(candidate) as memory:
            if memory is not None:
                statuses.append(_status(memory))
    return sorted((status for status in statuses if status.members), key=lambda status: status.name)


def _status(memory: FeedMemory) -> FeedStatus:
    header, facts = memory.header, memory.facts
    alive = [member for member in memory.present() if memory.lives(member)]
    processes = {memory.members[member].get("process") - 1 for member in alive}
    units = {memory.processes[p].get("pid"): memory.processes[p].get("units") for p in sorted(processes)}
    nbytes = NBYTES + header.get("slots") * header.get("slot_nbytes")
    members = tuple(_member(memory, member, alive) for member in alive)
    slots = header.get("slots")
    return FeedStatus(facts.name, facts.plan, facts.phase, facts.unit, slots, nbytes, units, members)


def _member(memory: FeedMemory, member: int, alive: Sequence[int]) -> MemberStatus:
    words, unit = memory.members[member], memory.header.get("unit")
    lasted, wanted = max(1e-9, _seconds_since(words.get("since"))), words.get("wanted")
    waited = words.get("waited_ns") / 1e9 + (_seconds_since(words.get("waits_since")) if wanted else 0.0)
    position = words.get("position")
    return MemberStatus(
        member, words.get("pid"), words.get("batch"), position // memory.header.get("epoch"), position * unit,
        words.get("records"), words.get("records") / lasted, waited,
        _waits_for(memory, member, alive), words.get("alone"), words.get("state") == HOLDS,
    )  # fmt: skip


def _seconds_since(ns: int) -> float:
    return (time.monotonic_ns() - ns) / 1e9


def _waits_for(memory: FeedMemory, member: int, alive: Sequence[int]) -> str:
    wanted = memory.members[member].get("wanted") - 1
    if wanted < 0:
        return ""
    pid = memory.maker_of(wanted)
    if pid is not None:
        return f"process {pid}, which makes the next unit"
    held = [other for other in alive if memory.members[other].get("state") == HOLDS]
    slowest = min(held, key=lambda other: memory.members[other].get("position"), default=member)
    behind = (wanted - memory.members[slowest].get("position")) * memory.header.get("unit")
    if slowest == member or behind < memory.slots * memory.header.get("unit"):
        return "a process with a core for the next unit"
    return f"member {slowest}, {behind} records behind"
