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
COLLECTIVES = 300  # most lines of collectives of proofs
FACTS = 300  # most sentences of proofs
UNKNOWN = 40  # most names without known costs


class ReportTimes(msgspec.Struct, frozen=True):
    """Predictions for a topology.

    Attributes:
        predictor: the cost model of the topology.
        prediction: the times of the schedule.
    """

    predictor: Predictor
    prediction: Prediction


class Recorded(msgspec.Struct, frozen=True):
    """A recorded run; both fields are empty if there is none.

    Attributes:
        traces: the run, or one run of each phase.
        measured: the totals of flight records; None for a run in Chrome's trace format.
    """

    traces: tuple[Trace, ...] = ()
    measured: Summary | None = None


def gather(
    schedule: Schedule, text: str | None, proofs: Proofs, timed: ReportTimes | None, recorded: Recorded
) -> ReportDocument:
    """Create the document of `schedule`.

    Args:
        schedule: the schedule.
        text: text of the plan file; None if it is not available or has changed.
        proofs: results of the verifier.
        timed: predicted times; None without a topology.
        recorded: a recorded run, may be empty.

    Returns:
        The document. It has no graphs and lines if the schedule does not contain its plan.
    """
    plan = schedule.origin.plan if schedule.origin is not None else None
    prediction = timed.prediction if timed else None
    times = prediction.phases if prediction else ()
    shown_choices, choices_left_out = choices(schedule.choices)
    titles = {phase.name: phase_title(phase) for phase in plan.phases} if plan else {}
    summaries: tuple[LineSummary, ...] = ()
    lines_left_out = ""
    if plan is not None:
        explanation = explain_plan(plan, schedule, timed.predictor if timed else None)
        summaries, lines_left_out = lines(explanation, times)
    return ReportDocument(
        plan=schedule.plan,
        version=__version__,
        facts=tuple(_facts(schedule, prediction)),
        source=_source(schedule, plan, text),
        graphs=graphs(plan) if plan else (),
        lines=summaries,
        lines_left_out=lines_left_out,
        choices=shown_choices,
        choices_left_out=choices_left_out,
        phases=phases(times, titles),
        unknown=prediction.unknown[:UNKNOWN] if prediction else (),
        proofs=_proofs(proofs),
        machine=machine(schedule, timed.predictor, prediction) if timed and prediction else None,
        traces=recorded.traces,
        measured=recorded.measured,
    )


def _proofs(proofs: Proofs) -> Proofs:
    """Truncate the proofs."""
    collectives, omitted_collectives = first_of(proofs.collectives, COLLECTIVES, "lines of collectives")
    facts, omitted_facts = first_of(proofs.facts, FACTS, "sentences")
    return msgspec.structs.replace(
        proofs,
        collectives=collectives,
        facts=facts,
        assumed=tuple(map(cut_text, proofs.assumed)),
        left_out="; ".join(filter(None, (omitted_collectives, omitted_facts))),
    )


def _facts(schedule: Schedule, prediction: Prediction | None) -> list[tuple[str, str]]:
    """The names and texts in the head of the page: sizes, backend, machine and passes."""
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
    """The text of the plan, or its stages if `text` is None."""
    if text is not None:
        written = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
    else:
        stages = [stage for phase in plan.phases for stage in phase.stages] if plan else []
        written = [(stage.span.line, stage_text(stage)) for stage in stages]
    shown, left_out = first_of(written, LINES, "lines")
    cut = tuple((number, cut_text(line)) for number, line in shown)
    return SourceText(schedule.file, cut, text is not None, left_out)
