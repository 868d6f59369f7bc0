"""Recording the work and the waits of this process for a feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commplan.runtime.input.observe.recorded_run import lane_of_run
from commplan.runtime.input.program import EpochCursor

if TYPE_CHECKING:
    from commplan.recorder.file import Call
    from commplan.recorder.lane import Lane
    from commplan.runtime.input.observe.batch_record import BatchRecord
    from commplan.runtime.input.ring.attachment import Attachment


def start_record(attachment: Attachment) -> None:
    """Record the units and waits of this process if its present run is recorded.

    The record of an earlier run is closed.
    """
    with attachment.record_lock:
        recording, lane = attachment.recording, lane_of_run(None, "feed")
        if recording.record is not None and recording.record.lane is not lane:
            recording.record.close()
            recording.record = None
        if recording.record is None and lane is not None and not attachment.ring.memory.is_stopped:
            recording.record = _record_of(attachment, lane)


def _record_of(attachment: Attachment, lane: Lane) -> BatchRecord:
    """The record of `attachment` in the lane of a run."""
    from commplan.runtime.input.observe.batch_record import BatchRecord  # noqa: PLC0415
    from commplan.runtime.input.observe.overdue_calls import OverdueCalls  # noqa: PLC0415

    cursor = EpochCursor(0, 0, attachment.content.epoch)
    calls = OverdueCalls(float("inf"), "")
    record = BatchRecord(lane, attachment.ring.memory.title, cursor, None)
    record.watch(lambda: calls.oldest(attachment.producers.running) or _wait(attachment), lambda: -1)
    return record


def _wait(attachment: Attachment) -> Call | None:
    """The oldest wait of a member of this process, as a call in progress; None if no member waits."""
    from commplan.recorder.file import Call  # noqa: PLC0415
    from commplan.runtime.input.ring.waiting import blocked_by  # noqa: PLC0415

    ring = attachment.ring
    members = [member for member in list(attachment.members) if member >= 0]  # see `Attachment.members`
    waits = [(ring.cursors[member].get("waits_since"), member) for member in members]
    waits = [(since, member) for since, member in waits if ring.cursors[member].get("wanted")]
    if not waits:
        return None
    since, member = min(waits)  # in nanoseconds
    blocker = blocked_by(ring, ring.cursors[member].get("wanted") - 1)
    return Call(f"a wait of member {member} of {ring.memory.title} for {blocker}", since / 1e9)
