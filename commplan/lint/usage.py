"""Unused values, outputs and declarations: CP1201, CP1202, CP1209."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from commplan.diagnostics import Diagnostic, Fix, Note, Span, listed
from commplan.ir.plan import ExchangeStage, Load, MapStage, Phase, operands, results
from commplan.ir.types import AxisKind
from commplan.lint.subject import Subject

UNDERSCORE_NOTE = "begin the name with `_` if this is intended"  # for results of stages and declarations


def unused_values(subject: Subject) -> Iterator[Diagnostic]:
    """CP1201: a value that no stage reads and that is not bound to an output or a state."""
    plan = subject.plan
    used = {ref for phase in plan.phases for ref in _used_names(phase)}
    for ref in plan.inputs:
        value = plan.value(ref)
        if ref not in used and not value.name.startswith("_"):
            message = f"the input `{value.name}` is never used"
            note = "every caller of the plan has to pass it: leave it out"
            yield subject.warning("CP1201", message, value.span, note)
    for phase in plan.phases:
        for stage in phase.stages:
            for ref in results(stage):
                value = plan.value(ref)
                if ref in used or value.name.startswith("_"):
                    continue
                notes = [*_hidden(subject, phase, ref), UNDERSCORE_NOTE]
                fix = _without_count(stage, value.span) if isinstance(stage, Load) else None
                message = f"the value `{value.name}` is never used"
                yield subject.warning("CP1201", message, value.span, *notes, fix=fix)


def _used_names(phase: Phase) -> Iterator[str]:
    """The values that stages read, and those bound to outputs and states."""
    for stage in phase.stages:
        yield from operands(stage)
    for binding in (*phase.outputs, *phase.updates):
        yield binding.value


def _hidden(subject: Subject, phase: Phase, ref: str) -> list[Note]:
    """A note if the name of `ref` is bound again later in its phase."""
    value = subject.plan.value(ref)
    later = [
        other.span
        for stage in phase.stages
        for other in map(subject.plan.value, results(stage))
        if other.name == value.name and other.span > value.span
    ]
    return [Note(f"`{value.name}` is bound again here, and was not read before", min(later))] if later else []


def _without_count(stage: Load, count: Span) -> Fix | None:
    """Replace `x, n = load` with `x = load`; None if `count` is not `n`, or on another line than `x`."""
    first = stage.span
    if count.line != first.line or count.column == first.column:
        return None
    records = len(stage.result.partition(".")[0])
    return Fix(
        "leave the count out", Span(first.line, first.column + records, count.end_line, count.end_column), ""
    )


def idle_outputs(subject: Subject) -> Iterator[Diagnostic]:
    """CP1202: an output that equals an input, or whose name no program uses."""
    plan, inputs = subject.plan, subject.inputs
    used_names = set[str]()
    for text in inputs.programs.values():
        used_names |= _names(text)
    for number, phase in enumerate(plan.phases):
        for output in phase.outputs:
            span = subject.output_span(number, output.name)
            if output.value in plan.inputs:
                message = f"the output `{output.name}` is the unchanged input of that name"
                note = "the program has it already: leave it out, or bind the name to the value to return"
                yield subject.warning("CP1202", message, span, note)
            elif inputs.programs and output.name not in used_names:
                message = f"the output `{output.name}` is never used"
                note = f"no attribute, argument or key of that name is in {listed(inputs.programs)}"
                yield subject.warning("CP1202", message, span, note)


def _names(text: str) -> set[str]:
    """All attributes, variables, arguments and strings of a Python program, as possible uses of outputs."""
    import ast  # only for --program

    names = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
            case _:
                pass
    return names


def unused_declarations(subject: Subject) -> Iterator[Diagnostic]:
    """CP1209: a source that is not loaded, a function that is not called, or a server without states."""
    plan = subject.plan
    loaded = {stage.source for stage in subject.stages if isinstance(stage, Load)}
    called_fns = {stage.fn for stage in subject.stages if isinstance(stage, MapStage | ExchangeStage)}
    servers = {value.placement.server for value in plan.values}
    axes = [axis for axis in plan.axes if axis.kind is AxisKind.SERVER]
    bound = "every program that binds the plan has to pass it"
    unused = [("source", item.name, item.span, bound) for item in plan.sources if item.name not in loaded]
    unused += [
        ("fn", item.name, item.span, bound if item.body is None else "it has no effect")
        for item in plan.fns
        if item.name not in called_fns
    ]
    idle = "its processes would wait for nothing"
    unused += [("server", item.name, item.span, idle) for item in axes if item.name not in servers]
    for kind, name, span, why in unused:
        if not name.startswith("_"):
            message = f"the {kind} `{name}` is never used"
            yield subject.warning("CP1209", message, span, f"{why}: leave it out", UNDERSCORE_NOTE)
