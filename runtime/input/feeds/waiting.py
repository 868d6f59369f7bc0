"""How a member of a feed waits for a unit, and for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from commplan.diagnostics import fail
from commplan.runtime.input.feeds.attachment import Attachment
from commplan.runtime.input.feeds.memory import FeedMemory
from commplan.runtime.input.observe.wait_log import LOG, ClosedError, WaitReporter
from commplan.runtime.input.shm.shm_control import LOOK_S
from commplan.wait import Wait


def wait_on(
    attachment: Attachment, member: int, unit: int, timeout: float, is_open: Callable[[], bool], file: str
) -> None:  # fmt: skip
    """Until `unit` is made, for `timeout` seconds: with looks at who keeps it from that. is_open: whether the
    member is still there, while others of this process go on. file: of the plan.

    Errors: CP0946 where it waits for a member that the same thread drives, CP0947 after `timeout`.
    """
    memory, lasting = attachment.memory, WaitReporter()
    who_waits = f"member {member} of feed {memory.facts.name!r}"

    def look(waited: float) -> None:
        if memory.reap():
            return
        _refuse_own(attachment, who_waits, unit, file)
        if lasting.due(waited):
            LOG.warning("%s has waited %.0f s for %s%s", who_waits, waited, *waits_for(memory, unit))

    def late(waited: float) -> NoReturn:
        who, state = waits_for(memory, unit)
        fail(
            "CP0947",
            f"{who_waits} waited {waited:.0f} s for {who}{state}",
            f"{memory.slots * memory.header.get('unit')} records are kept at most",
            "end what does not go on, or close its feed",
            file=file,
        )

    def is_there() -> bool:
        if not is_open():
            raise ClosedError
        return memory.is_made(unit)

    memory.ring("taken")  # a unit that a dead process began is to be made anew
    memory.wait("made", is_there, Wait(timeout, late, look, LOOK_S))


def _refuse_own(attachment: Attachment, who_waits: str, unit: int, file: str) -> None:
    """Raise CP0946 where this wait is for a member that the calling thread drives."""
    memory = attachment.memory
    if memory.slot_words[unit % memory.slots].get("unit") == unit + 1:
        return
    slowest, thread = slowest_of(memory, unit), threading.get_ident()
    if slowest in attachment.members and attachment.drivers.get(slowest, thread) == thread:
        fail(
            "CP0946",
            f"{who_waits} would wait for member {slowest}, which the same thread drives",
            f"{memory.slots * memory.header.get('unit')} records are kept at most",
            f"drive member {slowest} first, give each member a thread of its own, or close its feed",
            file=file,
        )


def waits_for(memory: FeedMemory, unit: int) -> tuple[str, str]:
    """Whom a member that waits for `unit` waits for, and how that one is."""
    from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded where a wait is long

    holder = memory.lock_holder()
    if holder and process_state(holder) != "alive":
        return f"process {holder}, which holds the feed", f": it is {process_state(holder)}"
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
