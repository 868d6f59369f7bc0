"""Simulated phases as lanes of events, with the critical path."""

from __future__ import annotations

from collections.abc import Mapping

from commplan.cost.schedule.prediction import OpTime, PhaseTime
from commplan.explain.times import phase_times
from commplan.report.document import CriticalStretch, EventLane, LaneEvent, PhasePanel, Work
from commplan.report.lanes import condensed

CRITICAL = 200  # most parts of the critical path


def phases(times: tuple[PhaseTime, ...], titles: Mapping[str, str]) -> tuple[PhasePanel, ...]:
    """Convert the predicted times of phases.

    Args:
        times: the predicted times of each phase.
        titles: headings of phases in the plan, by name; a phase without one is called by its name.
    """
    return tuple(_phase(phase, titles.get(phase.name, phase.name)) for phase in times)


def _phase(phase: PhaseTime, title: str) -> PhasePanel:
    """The panel of a phase. Lanes are in the order of their first op; those without timed ops are omitted."""
    events_of_lane: dict[str, list[LaneEvent]] = {}
    for op in phase.ops:
        events = events_of_lane.setdefault(op.lane, [])
        if op.seconds > 0:
            events.append(_event(op))
    lanes = [
        EventLane(name.replace("_", " "), tuple(sorted(events, key=lambda event: event.start)))
        for name, events in events_of_lane.items()
        if events
    ]
    shown, left_out = condensed(lanes)
    critical: dict[tuple[int, str], float] = {}
    for part in phase.critical:
        critical[part.line, part.label] = critical.get((part.line, part.label), 0.0) + part.seconds
    return PhasePanel(
        phase.name,
        title,
        phase.alone,
        phase.computation,
        phase.exposed,
        phase.seconds,
        phase.bound,
        phase.network,
        phase.compute,
        dict(phase.nbytes),
        tuple(CriticalStretch(*key, seconds) for key, seconds in critical.items())[:CRITICAL],
        shown,
        sum(op.seconds <= 0 for op in phase.ops),
        tuple(phase_times(phase)),
        left_out,
    )


def _event(op: OpTime) -> LaneEvent:
    """The event of an op with a known duration."""
    form = f" ({op.form})" if op.form else ""
    return LaneEvent(
        op.op,
        op.line,
        op.start,
        op.seconds,
        work_on(op.lane),
        f"{op.algorithm}{form}",
        busy=op.seconds,
        alone=op.alone,
        bound=op.bound,
        result=op.result,
        nbytes={level: nbytes for level, nbytes in op.nbytes if nbytes},
    )


def work_on(lane: str) -> Work:
    """The kind of work on a lane, for example for `network:host` or `host_read`."""
    for work in ("network", "device", "host"):
        if lane.startswith(work):
            return work
    return "other"
