"""How a member of a feed waits for a unit, and for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from commplan.diagnostics import fail
from commplan.runtime.input.feeds.attachment import Attachment
from commplan.runtime.input.feeds.memory import FeedMemory
from commplan.runtime.input.observe.wait_log import LOG, ClosedError, WaitReporter
from commplan.runtime.input.shm.shm_control import LOOK_S
from commplan.wait import Wait


class WaitingMember(NamedTuple):
    """feed: its name. timeout: seconds. file: of the plan."""

    feed: str
    member: int
    timeout: float
    file: str


def wait_on(attachment: Attachment, own: WaitingMember, unit: int, is_open: Callable[[], bool]) -> None:
    """Until `unit` is made: for longer, with a look at who keeps it from that. is_open: whether the member is
    still there, while others of this process go on.

    Errors: CP0946 where it waits for a member that the same thread drives, CP0947 after `timeout`.
    """
    memory, lasting = attachment.memory, WaitReporter()

    def look(waited: float) -> None:
        if memory.reap():
            return
        _refuse_own(attachment, own, unit)
        if lasting.due(waited):
            LOG.warning("member %d of feed %r has waited %.0f s for %s", own.member, own.feed, waited,
                        waits_for(memory, unit)[0])  # fmt: skip

    def late(waited: float) -> NoReturn:
        who, state = waits_for(memory, unit)
        fail(
            "CP0947",
            f"member {own.member} of feed {own.feed!r} waited {waited:.0f} s for {who}{state}",
            f"{memory.slots * memory.header.get('unit')} records are kept at most",
            "end what does not go on, or close its feed",
            file=own.file,
        )

    def is_there() -> bool:
        if not is_open():
            raise ClosedError
        return memory.is_made(unit)

    memory.ring("taken")  # a unit that a dead process began is to be made anew
    memory.wait("made", is_there, Wait(own.timeout, late, look, LOOK_S))


def _refuse_own(attachment: Attachment, own: WaitingMember, unit: int) -> None:
    """Raise CP0946 where this wait is for a member that the calling thread drives."""
    memory = attachment.memory
    if memory.slot_words[unit % memory.slots].get("unit") == unit + 1:
        return
    slowest, thread = slowest_of(memory, unit), threading.get_ident()
    if slowest in attachment.members and attachment.drivers.get(slowest, thread) == thread:
        fail(
            "CP0946",
            f"member {own.member} of feed {own.feed!r} would wait for member {slowest},"
            " which the same thread drives",
            f"{memory.slots * memory.header.get('unit')} records are kept at most",
            f"drive member {slowest} first, give each member a thread of its own, or close its feed",
            file=own.file,
        )


def waits_for(memory: FeedMemory, unit: int) -> tuple[str, str]:
    """Whom a member that waits for `unit` waits for, and how that one is."""
    from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded where a wait is long

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
