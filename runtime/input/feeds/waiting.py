"""Whom a member of a feed waits for."""

from __future__ import annotations

from commplan.runtime.input.feeds.memory import FeedMemory


def waits_for(memory: FeedMemory, unit: int) -> tuple[str, str]:
    """Whom a member that waits for `unit` waits for, and how that one is."""
    from commplan.recorder.blame import process_state  # noqa: PLC0415  loaded where a wait is long

    pid = memory.maker_of(unit)
    if pid is not None:
        return f"process {pid}, which makes it", f": it is {process_state(pid)}"
    slowest = slowest_of(memory, unit)
    if slowest is None:
        return "a process that has a core for it", ""
    member = memory.members[slowest]
    behind = (unit - member.get("position")) * memory.header.get("unit")
    pid = member.get("pid")
    return (
        f"member {slowest} (process {pid}), which is {behind} records behind",
        f": it is {process_state(pid)}",
    )


def slowest_of(memory: FeedMemory, unit: int) -> int | None:
    """The member that keeps `unit` from being made; None where nobody does."""
    slowest = min(memory.holding(), key=lambda m: memory.members[m].get("position"), default=None)
    if slowest is None or memory.members[slowest].get("position") > unit - memory.slots:
        return None
    return slowest
