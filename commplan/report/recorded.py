"""What the ranks of a run recorded, as lanes: of each phase the run of it that took the middle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from commplan.recorder import Run
from commplan.recorder.collectives import Slice, by_rank, step_of
from commplan.report.document import Event, Lane, Trace
from commplan.report.lanes import condensed


class _Step(NamedTuple):
    """A run of a phase. seconds: until the next one begins, on the first rank."""

    seconds: float
    number: int


def traces(run: Run, phases_of: Mapping[int, str] | None = None) -> tuple[Trace, ...]:
    """One for each phase; of steps that are recorded whole, one for each of them.

    phases_of: the phases of the plan by their lines.
    """
    slices = by_rank(run.slices)
    phases = sorted({each.phase for each in run.slices if each.phase})
    if not phases:
        names = dict.fromkeys(each.name for each in run.slices)
        return tuple(_called(run, slices, name, phases_of or {}) for name in names)
    shown: list[Trace] = []
    for phase in phases:
        step = _typical(next(iter(slices.values())), phase)
        inside = {
            rank: [each for each in own if (each.phase, each.step) == (phase, step)]
            for rank, own in slices.items()
        }
        count = len({each.step for own in slices.values() for each in own if each.phase == phase})
        middle = f", the middle one of {count:,}" if count > 1 else ""
        shown.append(_trace(run, inside, phase, f"run {step:,} of {phase}{middle}"))
    return tuple(shown)


def _called(run: Run, slices: dict[int, list[Slice]], name: str, phases_of: Mapping[int, str]) -> Trace:
    """The call of a step that took the middle time on the first rank, the first one aside."""
    own = [each for each in next(iter(slices.values())) if each.name == name]
    later = sorted((each for each in own if each.runs > 1), key=lambda each: each.end - each.begin) or own
    number = later[len(later) // 2].runs if later else 1
    inside = {
        rank: [each for each in each_of if (each.name, each.runs) == (name, number)]
        for rank, each_of in slices.items()
    }
    line = next((each.line for each in run.slices if each.name == name), 0)
    middle = f", the middle one of {len(own):,}" if len(own) > 1 else ""
    return _trace(run, inside, phases_of.get(line, ""), f"call {number:,} of `{step_of(name)}`{middle}")


def _typical(slices: Sequence[Slice], phase: str) -> int:
    """The number of the run of `phase` that took the middle time, the first one aside, which may compile."""
    opening = [each for each in slices if each.details and each.details.opens == phase]
    steps = [
        _Step(after.begin - before.begin, before.step)
        for before, after in pairwise(opening)
        if before.step > 1 and after.step == before.step + 1
    ]
    if not steps:
        return max((each.step for each in slices if each.phase == phase), default=1)
    return sorted(steps)[len(steps) // 2].number


def _trace(run: Run, slices: dict[int, list[Slice]], phase: str, name: str) -> Trace:
    first = min((each.begin for own in slices.values() for each in own), default=0.0)
    last = max((each.end for own in slices.values() for each in own), default=first)
    lanes: list[Lane] = []
    hosts = {record.host for record in run.records}
    for record in run.records:
        own, label = slices.get(record.rank, []), f"{'rank' if record.axes else 'process'} {record.rank}"
        group = record.host if len(hosts) > 1 else ""
        lanes.append(Lane(label, tuple(_event(each, first) for each in own), group))
        waits = [each for each in own if each.waits_apart]
        if waits:
            lanes.append(Lane(f"{label} waits", tuple(_wait(each, first) for each in waits), group))
    shown, left_out = condensed(lanes)
    return Trace(name, last - first, shown, left_out, phase)


def _event(each: Slice, first: float) -> Event:
    known, seconds = each.details, each.end - each.begin
    return Event(
        known.kind if known else step_of(each.name),
        each.line,
        each.begin - first,
        seconds,
        "network" if known else "device",
        known.algorithm if known else "",
        busy=seconds,
        waited=each.held,
        last=each.holder,
        predicted=each.predicted or 0.0,
        size=known.nbytes if known else 0,
    )


def _wait(each: Slice, first: float) -> Event:
    begin, end = each.blocked
    return Event("wait", each.line, begin - first, end - begin, "other", busy=end - begin)
