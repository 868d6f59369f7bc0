"""The record of the current run, if it is recorded. Otherwise its modules are not loaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commplan.recorder.lane import Lane
    from commplan.runtime.input.group import Group
    from commplan.runtime.input.observe.batch_record import BatchRecord
    from commplan.runtime.input.program import EpochCursor, HostProgram


def lane_of_run(plan: str | None, name: str) -> Lane | None:
    """The lane `name` of the current run of `plan`, or of any plan for None; None if no run is recorded."""
    if "commplan.recorder.file" not in sys.modules:  # a recorded run has loaded it
        return None
    from commplan.recorder.lane import lane_of  # noqa: PLC0415

    return lane_of(plan, name)


def batch_record(program: HostProgram, cursor: EpochCursor, group: Group | None) -> BatchRecord | None:
    """A new record of the batches of a phase; None if no run is recorded, or if the phase has no loads.

    Args:
        program: the host part of the phase.
        cursor: the positions of batches.
        group: the processes that share loads; None if this one is alone. If set, the record has the line of
            the first `share`, else that of the first load.
    """
    reads = [read for flow in program.flows for read in flow.reads]
    lane = lane_of_run(program.schedule.plan, "input") if reads else None
    if lane is None:
        return None
    from commplan.runtime.input.observe.batch_record import BatchRecord  # noqa: PLC0415

    shared = [flow.shared for flow in program.flows if flow.shared is not None]
    line = (shared if group is not None and shared else reads)[0].span.line
    return BatchRecord(lane, f"line {line} of {program.schedule.file or 'the plan'}", cursor, group)
