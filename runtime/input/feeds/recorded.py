"""What this process does for a feed, in the record of its run, where it keeps one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from commplan.runtime.input.feeds.waiting import waits_for
from commplan.runtime.input.program import EpochCursor

if TYPE_CHECKING:
    from commplan.recorder.file import Call
    from commplan.recorder.lane import Lane
    from commplan.runtime.input.feeds.attachment import Attachment
    from commplan.runtime.input.observe.batch_record import BatchRecord


def start_record(attachment: Attachment) -> None:
    """From now on what this process makes and waits for goes into the record of its run, where it keeps one:
    no longer into that of an earlier run."""
    if "commplan.recorder.lane" not in sys.modules:  # what a run that is recorded has loaded
        return
    from commplan.recorder.lane import lane_of  # noqa: PLC0415

    with attachment.recording:
        threads, lane = attachment.threads, lane_of(None, "feed")
        if threads.record is not None and threads.record.lane is not lane:
            threads.record.close()
            threads.record = None
        if threads.record is None and lane is not None and not attachment.memory.stopped:
            threads.record = _record_of(attachment, lane)


def _record_of(attachment: Attachment, lane: Lane) -> BatchRecord:
    from commplan.runtime.input.observe.batch_record import BatchRecord  # noqa: PLC0415
    from commplan.runtime.input.prefetch.overdue_calls import OverdueCalls  # noqa: PLC0415

    name, cursor = attachment.memory.facts.name, EpochCursor(0, 0, attachment.maker.epoch)
    record, calls = BatchRecord(lane, f"feed {name!r}", cursor, None), OverdueCalls(float("inf"), "")
    record.watch(lambda: calls.oldest(attachment.threads.running) or _wait(attachment), lambda: -1)
    return record


def _wait(attachment: Attachment) -> Call | None:
    """What a member here waits for, as what this process is in."""
    from commplan.recorder.file import Call  # noqa: PLC0415

    memory = attachment.memory
    waits = [(memory.members[m].get("waits_since"), m) for m in list(attachment.members) if m >= 0]
    waits = [(since, m) for since, m in waits if memory.members[m].get("wanted")]
    if not waits:
        return None
    since, member = min(waits)
    who, state = waits_for(memory, memory.members[member].get("wanted") - 1)
    return Call(f"a wait of member {member} of feed {memory.facts.name!r} for {who}{state}", since / 1e9)
