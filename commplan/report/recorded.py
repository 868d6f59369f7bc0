"""Recorded runs as lanes: for each phase, the run of median duration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from commplan.recorder.collectives import Run, Slice, by_rank
from commplan.recorder.verdict import step_of
from commplan.report.document import EventLane, LaneEvent, Trace
from commplan.report.lanes import condensed


class _PhaseRun(NamedTuple):
    """A run of a phase. `seconds`: until the next run begins on the first rank."""

    seconds: float
    number: int


def traces(run: Run, phases_of: Mapping[int, str] | None = None) -> tuple[Trace, ...]:
    """One trace for each phase, or for each step if steps are recorded as a whole.

    Args:
        run: the recorded run.
        phases_of: phase of each plan line.
    """
    slices = by_rank(run.slices)
    phases = sorted({slice_.phase for slice_ in run.slices if slice_.phase})
    if not phases:
        names = dict.fromkeys(slice_.name for slice_ in run.slices)
        return tuple(_called(run, slices, name, phases_of or {}) for name in names)
    shown: list[Trace] = []
    for phase in phases:
        step = _typical(next(iter(slices.values())), phase)
        inside = {
            rank: [slice_ for slice_ in rank_slices if (slice_.phase, slice_.step) == (phase, step)]
            for rank, rank_slices in slices.items()
        }
        count = len(
            {
                slice_.step
                for rank_slices in slices.values()
                for slice_ in rank_slices
                if slice_.phase == phase
            }
        )
        middle = f", the middle one of {count:,}" if count > 1 else ""
        shown.append(_trace(run, inside, phase, f"run {step:,} of {phase}{middle}"))
    return tuple(shown)


def _called(run: Run, slices: dict[int, list[Slice]], name: str, phases_of: Mapping[int, str]) -> Trace:
    """The call of a step with the median duration on the first rank, except the first call."""
    calls = [slice_ for slice_ in next(iter(slices.values())) if slice_.name == name]
    later = (
        sorted((slice_ for slice_ in calls if slice_.runs > 1), key=lambda slice_: slice_.end - slice_.begin)
        or calls
    )
    number = later[len(later) // 2].runs if later else 1
    inside = {
        rank: [slice_ for slice_ in each_of if (slice_.name, slice_.runs) == (name, number)]
        for rank, each_of in slices.items()
    }
    line = next((slice_.line for slice_ in run.slices if slice_.name == name), 0)
    middle = f", the middle one of {len(calls):,}" if len(calls) > 1 else ""
    return _trace(run, inside, phases_of.get(line, ""), f"call {number:,} of `{step_of(name)}`{middle}")


def _typical(slices: Sequence[Slice], phase: str) -> int:
    """The number of the run of `phase` with the median duration, except the first, which may compile."""
    opening = [slice_ for slice_ in slices if slice_.details and slice_.details.opens == phase]
    steps = [
        _PhaseRun(after.begin - before.begin, before.step)
        for before, after in pairwise(opening)
        if before.step > 1 and after.step == before.step + 1
    ]
    if not steps:
        return max((slice_.step for slice_ in slices if slice_.phase == phase), default=1)
    return sorted(steps)[len(steps) // 2].number


def _trace(run: Run, slices: dict[int, list[Slice]], phase: str, name: str) -> Trace:
    first = min((slice_.begin for of_rank in slices.values() for slice_ in of_rank), default=0.0)
    last = max((slice_.end for of_rank in slices.values() for slice_ in of_rank), default=first)
    lanes: list[EventLane] = []
    hosts = {record.host for record in run.records}
    for record in run.records:
        label = f"{'rank' if record.axes else 'process'} {record.rank}"
        rank_slices = slices.get(record.rank, [])
        group = record.host if len(hosts) > 1 else ""
        lanes.append(EventLane(label, tuple(_event(slice_, first) for slice_ in rank_slices), group))
        waits = [slice_ for slice_ in rank_slices if slice_.waits_apart]
        if waits:
            lanes.append(EventLane(f"{label} waits", tuple(_wait(slice_, first) for slice_ in waits), group))
    shown, left_out = condensed(lanes)
    return Trace(name, last - first, shown, left_out, phase)


def _event(slice_: Slice, first: float) -> LaneEvent:
    details, seconds = slice_.details, slice_.end - slice_.begin
    return LaneEvent(
        details.kind if details else step_of(slice_.name),
        slice_.line,
        slice_.begin - first,
        seconds,
        "network" if details else "device",
        details.algorithm if details else "",
        busy=seconds,
        waited=slice_.waited_s,
        last=slice_.holder,
        predicted=slice_.predicted or 0.0,
        size=details.nbytes if details else 0,
    )


def _wait(slice_: Slice, first: float) -> LaneEvent:
    begin, end = slice_.blocked
    return LaneEvent("wait", slice_.line, begin - first, end - begin, "other", busy=end - begin)
