"""Collect the document of the page from a schedule and its proofs, times and records."""

from __future__ import annotations

import msgspec

from commplan import __version__
from commplan.cost import Prediction, Predictor
from commplan.explain.report import explain_plan
from commplan.explain.stages import levels_text, phase_title, stage_text
from commplan.ir.plan import AxisKind, Plan
from commplan.ir.schedule import Schedule
from commplan.recorder.summary import Summary
from commplan.report.choices import choices, lines
from commplan.report.document import (
    LineSummary,
    Proofs,
    ReportDocument,
    SourceText,
    Trace,
    cut_text,
    first_of,
)
from commplan.report.graph import graphs
from commplan.report.machine import machine
from commplan.report.timeline import phases

LINES = 4000  # most lines of the plan's text
COLLECTIVES, FACTS = 300, 300  # most collectives and sentences of proofs
UNKNOWN = 40  # most names without known costs


class ReportTimes(msgspec.Struct, frozen=True):
    """Predictions for a topology."""

    predictor: Predictor
    prediction: Prediction


class Recorded(msgspec.Struct, frozen=True):
    """A recorded run."""

    traces: tuple[Trace, ...] = ()
    measured: Summary | None = None


def gather(
    schedule: Schedule, text: str | None, proofs: Proofs, timed: ReportTimes | None, recorded: Recorded
) -> ReportDocument:
    """Create the document of `schedule`.

    Args:
        schedule: the schedule.
        text: text of the plan file, if available.
        proofs: output of the verifier.
        timed: None without a topology.
        recorded: a recorded run, may be empty.
    """
    plan = schedule.origin.plan if schedule.origin is not None else None
    prediction = timed.prediction if timed else None
    times = prediction.phases if prediction else ()
    chosen, left_out = choices(schedule.choices)
    titles = {phase.name: phase_title(phase) for phase in plan.phases} if plan else {}
    became: tuple[tuple[LineSummary, ...], str] = ((), "")
    if plan is not None:
        became = lines(explain_plan(plan, schedule, timed.predictor if timed else None), times)
    return ReportDocument(
        plan=schedule.plan,
        version=__version__,
        facts=tuple(_facts(schedule, prediction)),
        source=_source(schedule, plan, text),
        graphs=graphs(plan) if plan else (),
        lines=became[0],
        lines_left_out=became[1],
        choices=chosen,
        choices_left_out=left_out,
        phases=phases(times, titles),
        unknown=prediction.unknown[:UNKNOWN] if prediction else (),
        proofs=_proofs(proofs),
        machine=machine(schedule, timed.predictor, prediction) if timed and prediction else None,
        traces=recorded.traces,
        measured=recorded.measured,
    )


def _proofs(proofs: Proofs) -> Proofs:
    collectives, left_out = first_of(proofs.collectives, COLLECTIVES, "lines of collectives")
    facts, more = first_of(proofs.facts, FACTS, "sentences")
    return msgspec.structs.replace(
        proofs,
        collectives=collectives,
        facts=facts,
        assumed=tuple(map(cut_text, proofs.assumed)),
        left_out="; ".join(filter(None, (left_out, more))),
    )


def _facts(schedule: Schedule, prediction: Prediction | None) -> list[tuple[str, str]]:
    ranks = schedule.size(tuple(schedule.mesh_sizes))
    facts = [("ranks", f"{ranks:,}")]
    for axis in schedule.axes:
        location = f" on {levels_text(axis)}" if axis.levels else ""
        word = "axis" if axis.kind is AxisKind.REPLICA else axis.kind
        facts.append((f"{word} {axis.name}", f"{axis.size:,}{location}"))
    facts.append(("backend", schedule.backend))
    if prediction is not None:
        facts += [
            ("machine", prediction.topology),
            ("costs", prediction.source),
            ("computation", prediction.step),
        ]
    return [*facts, ("passes", schedule.pipeline.replace(",", ", ") or "none")]


def _source(schedule: Schedule, plan: Plan | None, text: str | None) -> SourceText:
    if text is not None:
        written = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
    else:
        stages = [stage for phase in plan.phases for stage in phase.stages] if plan else []
        written = [(stage.span.line, stage_text(stage)) for stage in stages]
    shown, left_out = first_of(written, LINES, "lines")
    cut = tuple((number, cut_text(line)) for number, line in shown)
    return SourceText(schedule.file, cut, text is not None, left_out)
