"""Lints on the cost of pins and buckets: CP1203, CP1204.

CP1203 requires the sizes of values, from shapes or from types in the plan. CP1204 requires a topology, or a
calibration for the design of a `share`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from commplan.diagnostics import Diagnostic, Span
from commplan.ir.plan import Algorithm, ElasticStage, Hints, Phase, ShareStage, Stage
from commplan.ir.stages import StageOverAxes
from commplan.ir.types import ArrayType, sized, timed
from commplan.lint.subject import Subject, with_stage

if TYPE_CHECKING:
    from commplan.cost import Prediction
    from commplan.ir.remark import SharingCost
    from commplan.ir.schedule import Schedule

PIN_MARGIN = 0.02  # least gain that is reported, as a fraction of a stage's time: the search's tolerance


def large_buckets(subject: Subject) -> Iterator[Diagnostic]:
    """CP1203: a bucket size that exceeds all data of its stage, so that nothing is split."""
    for phase in subject.plan.phases:
        for bucket, stages in _with_buckets(phase):
            sizes = [_nbytes(subject, stage) for stage in stages]
            total = sum(size or 0 for size in sizes)
            if None in sizes or bucket <= total:
                continue
            for stage in stages:
                name = subject.plan.value(stage.operand).name
                whole = f"`{name}`" + f" and the {len(stages) - 1} in the same buckets" * (len(stages) > 1)
                message = f"a bucket of {sized(bucket)} is larger than all of {whole}, {sized(total)}"
                note = "everything is sent at once, when the last leaf is made"
                more = "make the bucket smaller, or leave it out and the compiler chooses"
                yield subject.warning("CP1203", message, _span_of(stage), note, more)


def are_buckets_known(subject: Subject, lines: range) -> bool:
    """Whether shapes are available for the buckets on `lines`, so that unneeded ignores can be reported."""
    return not any(
        _nbytes(subject, stage) is None
        for phase in subject.plan.phases
        for _, stages in _with_buckets(phase)
        if any(_span_of(stage).line in lines for stage in stages)
        for stage in stages
    )


def are_costs_known(subject: Subject, lines: range) -> bool:
    """Whether costs are available, so that unneeded ignores can be reported; the same for all `lines`."""
    return subject.inputs.topology is not None and subject.inputs.calibration is not None


def _with_buckets(phase: Phase) -> list[tuple[int, list[StageOverAxes | ElasticStage]]]:
    """The bucket sizes in `phase`, each with the stages that may share such a bucket.

    These stages agree in everything except their values.
    """
    groups: dict[tuple[object, ...], list[StageOverAxes | ElasticStage]] = {}
    for stage in phase.stages:
        hints: Hints | None = getattr(stage, "hints", None)
        if isinstance(stage, StageOverAxes | ElasticStage) and hints is not None and hints.bucket is not None:
            form = (stage.verb, stage.axes, stage.source_parts()[1:])
            groups.setdefault((hints.bucket, form, hints, getattr(stage, "via", None)), []).append(stage)
    return [(bucket, stages) for (bucket, *_), stages in groups.items() if isinstance(bucket, int)]


def _span_of(stage: StageOverAxes | ElasticStage) -> Span:
    """The location of a stage."""
    span: Span = cast("Stage", stage).span
    return span


def _nbytes(subject: Subject, stage: StageOverAxes | ElasticStage) -> int | None:
    """Bytes of a rank's operand or result, whichever is larger; None if their leaves are unknown."""
    sizes = list[int]()
    for ref in (stage.operand, stage.result):
        written = subject.plan.value(ref).type
        if subject.values is not None:
            sizes.append(subject.values[ref].nbytes)
        elif isinstance(written, ArrayType):
            sizes.append(written.size * written.dtype.nbytes)
        else:
            return None
    return max(sizes)


def costly_pins(subject: Subject) -> Iterator[Diagnostic]:
    """CP1204: a `via`, `chunk` or `wire` that is predicted to be slower than the schedule without it."""
    if subject.schedule is None:
        return
    pinned = _predict(subject, subject.schedule) if subject.inputs.topology is not None else None
    for phase in subject.plan.phases:
        for stage in phase.stages:
            if isinstance(stage, ShareStage):
                yield from _costly_design(subject, stage)
            elif pinned is not None:
                yield from _costly_pin(subject, pinned, phase.name, stage)


def _costly_pin(subject: Subject, pinned: Prediction, phase: str, stage: Stage) -> Iterator[Diagnostic]:
    """The pins of a stage that increase the exposed time of its phase."""
    for pin, free in _without_pins(stage):
        schedule = subject.compiled(with_stage(subject.plan, stage, free))
        before = _exposed_time(pinned, phase)
        after = _exposed_time(_predict(subject, schedule), phase)
        alone = sum(op.alone for op in pinned.phase(phase).ops if op.line == stage.span.line)
        if before - after <= PIN_MARGIN * alone:
            continue
        message = f"{pin} leaves {timed(before)} of the phase exposed; without it {timed(after)}"
        note = f"without it: {_chosen(schedule, stage.span) or 'the choice of the compiler'}"
        yield subject.warning("CP1204", message, stage.span, note, "leave it out, or pin the faster one")


def _without_pins(stage: Stage) -> Iterator[tuple[str, Stage]]:
    """The pins of a stage, as text, each with the stage without it."""
    via: Algorithm | None = getattr(stage, "via", None)
    hints: Hints | None = getattr(stage, "hints", None)
    if via is not None:
        yield f"`via {via}`", _replace_fields(stage, via=None)
    if hints is not None and hints.chunk is not None:
        yield f"`chunk = {sized(hints.chunk)}`", _replace_fields(stage, hints=replace(hints, chunk=None))
    if hints is not None and (wire := hints.codec or hints.wire) is not None:
        yield f"`wire = {wire}`", _replace_fields(stage, hints=replace(hints, wire=None, codec=None))


def _replace_fields(stage: Stage, **fields: object) -> Stage:
    """Replace fields that `stage` has."""
    other: Stage = replace(stage, **fields)  # the members of the union have different fields
    return other


def _predict(subject: Subject, schedule: Schedule) -> Prediction:
    """The predicted times on the topology of `subject`, which must have one."""
    from commplan.cost import predict, predictor_for

    topology, measured = subject.inputs.topology, subject.inputs.calibration
    predictor = predictor_for(schedule.axes, topology, measured, schedule.backend)
    assert predictor is not None
    return predict(schedule, predictor, measured=measured.input if measured else None)


def _exposed_time(prediction: Prediction, phase: str) -> float:
    return prediction.phase(phase).exposed


def _chosen(schedule: Schedule, span: Span) -> str | None:
    """The choice of `select` for the stage at `span`; None if it made none."""
    choices = [choice.what for choice in schedule.choices if choice.span == span and choice.by == "select"]
    return choices[0] if choices else None


def _costly_design(subject: Subject, stage: ShareStage) -> Iterator[Diagnostic]:
    """A sharing design that is slower than another one, according to measured costs."""
    assert subject.schedule is not None
    costs: Mapping[bool, list[SharingCost]] = {True: [], False: []}  # by whether the plan pins the design
    for choice in subject.schedule.choices:
        for cost in choice.sharing if choice.span == stage.span else ():
            costs[cost.taken].append(cost)
    if not costs[True] or not costs[False]:
        return
    actual, best = costs[True][0], min(costs[False], key=lambda cost: cost.wall)
    if actual.wall - best.wall <= PIN_MARGIN * actual.wall:
        return
    times = f"{timed(actual.wall)} instead of {timed(best.wall)}"
    message = f"`via {actual.design}` makes a step take {times}"
    note = f"by `{best.design}`, which waits for {best.waits_for}"
    yield subject.warning("CP1204", message, stage.span, note, "pin that one, or leave the `share` out")
