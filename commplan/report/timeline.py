"""The simulated phases for the page: lanes of events, and the critical path summed over buckets."""

from __future__ import annotations

from collections.abc import Mapping

from commplan.cost.schedule.prediction import OpTime, PhaseTime
from commplan.explain.times import phase_times
from commplan.report.document import Event, Lane, Phase, Stretch, Work
from commplan.report.lanes import condensed

CRITICAL = 200  # stretches of the critical path


def phases(times: tuple[PhaseTime, ...], titles: Mapping[str, str]) -> tuple[Phase, ...]:
    """titles: of phases, by name."""
    return tuple(_phase(phase, titles.get(phase.name, phase.name)) for phase in times)


def _phase(phase: PhaseTime, title: str) -> Phase:
    events: dict[str, list[Event]] = {}
    for op in phase.ops:
        of_lane = events.setdefault(op.lane, [])
        if op.seconds > 0:
            of_lane.append(_event(op))
    lanes = [
        Lane(name.replace("_", " "), tuple(sorted(of_lane, key=lambda event: event.start)))
        for name, of_lane in events.items()
        if of_lane
    ]
    shown, left_out = condensed(lanes)
    critical: dict[tuple[int, str], float] = {}
    for part in phase.critical:
        critical[part.line, part.what] = critical.get((part.line, part.what), 0.0) + part.seconds
    return Phase(
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
        tuple(Stretch(*key, seconds) for key, seconds in critical.items())[:CRITICAL],
        shown,
        sum(op.seconds <= 0 for op in phase.ops),
        tuple(phase_times(phase)),
        left_out,
    )


def _event(op: OpTime) -> Event:
    form = f" ({op.form})" if op.form else ""
    return Event(
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
    """What runs on a lane, whatever it is called in full: `network:host`, `host_read`."""
    for work in ("network", "device", "host"):
        if lane.startswith(work):
            return work
    return "other"
