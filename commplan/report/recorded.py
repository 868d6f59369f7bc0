"""Flight records as lanes: for each phase, the run of median duration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from commplan.recorder.collectives import Run, Slice, by_rank
from commplan.recorder.verdict import step_of
from commplan.report.document import EventLane, LaneEvent, Trace
from commplan.report.lanes import condensed


class _PhaseRun(NamedTuple):
    """A run of a phase on the first rank; runs are sorted by duration.

    Attributes:
        seconds: seconds until the next run begins.
        number: number of the run, counted from 1.
    """

    seconds: float
    number: int


def traces(run: Run, phases_of: Mapping[int, str] | None = None) -> tuple[Trace, ...]:
    """One trace for each phase, or for each step if steps are recorded as a whole.

    Args:
        run: the recorded run.
        phases_of: name of the phase of each plan line, for steps that are recorded as a whole.
    """
    ranks = by_rank(run.slices)
    phases = sorted({operation.phase for operation in run.slices if operation.phase})
    if not phases:
        names = dict.fromkeys(operation.name for operation in run.slices)
        return tuple(_median_call(run, ranks, name, phases_of or {}) for name in names)
    return tuple(_median_run(run, ranks, phase) for phase in phases)


def _median_run(run: Run, ranks: dict[int, list[Slice]], phase: str) -> Trace:
    """The run of a phase with the median duration on the first rank."""
    step = _median_step(next(iter(ranks.values())), phase)
    selected = {
        rank: [operation for operation in slices if (operation.phase, operation.step) == (phase, step)]
        for rank, slices in ranks.items()
    }
    count = len({operation.step for operation in run.slices if operation.phase == phase})
    middle = f", the median of {count:,}" if count > 1 else ""
    return _trace(run, selected, phase, f"run {step:,} of {phase}{middle}")


def _median_call(run: Run, ranks: dict[int, list[Slice]], name: str, phases_of: Mapping[int, str]) -> Trace:
    """The call of a step with the median duration on the first rank.

    The first call, which may compile, only counts if there is no other.
    """
    calls = [operation for operation in next(iter(ranks.values())) if operation.name == name]
    later = sorted((call for call in calls if call.runs > 1), key=lambda call: call.end - call.begin) or calls
    number = later[len(later) // 2].runs if later else 1
    selected = {
        rank: [operation for operation in slices if (operation.name, operation.runs) == (name, number)]
        for rank, slices in ranks.items()
    }
    line = next((operation.line for operation in run.slices if operation.name == name), 0)
    middle = f", the median of {len(calls):,}" if len(calls) > 1 else ""
    return _trace(run, selected, phases_of.get(line, ""), f"call {number:,} of `{step_of(name)}`{middle}")


def _median_step(slices: Sequence[Slice], phase: str) -> int:
    """The number of the run of `phase` with the median duration.

    The first run, which may compile, and runs without a recorded successor do not count. Without other runs,
    this is the last run.
    """
    first_operations = [
        operation for operation in slices if operation.details and operation.details.opens == phase
    ]
    runs = [
        _PhaseRun(after.begin - before.begin, before.step)
        for before, after in pairwise(first_operations)
        if before.step > 1 and after.step == before.step + 1
    ]
    if not runs:
        return max((operation.step for operation in slices if operation.phase == phase), default=1)
    return sorted(runs)[len(runs) // 2].number


def _trace(run: Run, ranks: dict[int, list[Slice]], phase: str, name: str) -> Trace:
    """The lanes of all ranks, with times from the first begin.

    Args:
        run: the recorded run.
        ranks: the operations to draw, by rank.
        phase: name of their phase.
        name: description of the trace.
    """
    first = min((operation.begin for slices in ranks.values() for operation in slices), default=0.0)
    last = max((operation.end for slices in ranks.values() for operation in slices), default=first)
    lanes: list[EventLane] = []
    hosts = {record.host for record in run.records}
    for record in run.records:
        label = f"{'rank' if record.axes else 'process'} {record.rank}"
        slices = ranks.get(record.rank, [])
        group = record.host if len(hosts) > 1 else ""
        lanes.append(EventLane(label, tuple(_event(operation, first) for operation in slices), group))
        waits = tuple(_wait(operation, first) for operation in slices if operation.waits_apart)
        if waits:
            lanes.append(EventLane(f"{label} waits", waits, group))
    shown, left_out = condensed(lanes)
    return Trace(name, last - first, shown, left_out, phase)


def _event(operation: Slice, first: float) -> LaneEvent:
    """A recorded collective, or a step that is recorded as a whole; `first` is the start of the trace."""
    details = operation.details
    seconds = operation.end - operation.begin
    return LaneEvent(
        details.kind if details else step_of(operation.name),
        operation.line,
        operation.begin - first,
        seconds,
        "network" if details else "device",
        details.algorithm if details else "",
        busy=seconds,
        waited=operation.waited_s,
        last=operation.holder,
        predicted=operation.predicted or 0.0,
        size=details.nbytes if details else 0,
    )


def _wait(operation: Slice, first: float) -> LaneEvent:
    """The time in which the program waited for an operation that ran in the background."""
    begin, end = operation.blocked
    return LaneEvent("wait", operation.line, begin - first, end - begin, "other", busy=end - begin)
