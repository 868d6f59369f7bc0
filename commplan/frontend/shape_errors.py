"""Diagnostics about shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from commplan.diagnostics import Diagnostic, Note, did_you_mean
from commplan.ir import plan as graph
from commplan.ir.schedule import Leaf, Value
from commplan.ir.stages import StageOverAxes, rules
from commplan.ir.types import LARGEST, ArrayType, RecordsType, TreeType

Leaves = tuple[Leaf, ...]
Shapes = Mapping[str, Leaves]


class ShapeReport:
    """Collects diagnostics, with one per code and name."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._problems: list[Diagnostic] = []
        self._reported: set[tuple[str, str]] = set()
        self._missing: dict[str, tuple[graph.Value, str]] = {}

    @property
    def problems(self) -> list[Diagnostic]:
        return [*self._problems, *self._all_missing()]

    def add(self, code: str, name: str, message: str, *notes: str, value: graph.Value | None = None) -> None:
        if (code, name) in self._reported:
            return
        self._reported.add((code, name))
        remarks = tuple(Note(note) for note in notes)
        self._problems.append(Diagnostic(code, message, value and value.span, remarks, file=self.file))

    def missing(self, value: graph.Value, kind: str) -> None:
        """Record a tree whose shapes are neither passed in nor implied."""
        self._missing.setdefault(value.name, (value, kind))

    def _all_missing(self) -> list[Diagnostic]:
        """One CP0701 for all trees without shapes."""
        if not self._missing:
            return []
        names = [f"`{name}`" for name in self._missing]
        (value, kind), *further = self._missing.values()
        message = f"no shapes for {names[0]}, {kind} of type tree".replace(",,", ",")
        if further:
            message = f"no shapes for {len(names)} trees: {', '.join(names)}"
        notes = [Note(f"`{other.name}` is {role.rstrip(',')}", other.span) for other, role in further]
        example = ", ".join(f'"{name}": tree' for name in self._missing)
        how = f"pass shapes={{{example}}}, pytrees whose leaves have shape and dtype"
        notes.append(Note(f"{how}; or --shapes MODULE:FUNCTION, which returns them, or a JSON file"))
        return [Diagnostic("CP0701", message, value.span, tuple(notes), file=self.file)]

    def differs(self, value: graph.Value, actual: Leaves, expected: Leaves, subject: str) -> None:
        """Report CP0705: two shapes for one value. The first difference is shown."""
        pairs = zip(actual, expected, strict=False)
        first = next(
            (f"expected {_show(b)}, found {_show(a)}" for a, b in pairs if a != b),
            f"expected {len(expected)} leaves, found {len(actual)}",
        )
        message = f"`{value.name}` has other shapes than {subject}"
        self.add("CP0705", value.name, message, first, "give one set of shapes, or another name", value=value)


def check_names(plan: graph.Plan, shapes: Shapes, report: ShapeReport) -> None:
    """Report CP0702 for every name in `shapes` that is no value or source of the plan."""
    names = sorted({value.name for value in plan.values} | {source.name for source in plan.sources})
    for name in shapes:
        if name in names:
            continue
        hint = did_you_mean(name, names, "its values are:")
        report.add("CP0702", name, f"shapes for `{name}`, which the plan does not have", hint)


def check_agreement(
    plan: graph.Plan, shapes: Shapes, inferred: Mapping[graph.Ref, Leaves | None], report: ShapeReport
) -> None:
    """Report CP0705 for shapes that contradict each other."""
    values = {value.id: value for value in plan.values}
    states = {values[ref].name: ref for ref in plan.states}

    def agree(ref: graph.Ref, expected_ref: graph.Ref, subject: str) -> None:
        actual, expected = inferred[ref], inferred[expected_ref]
        if actual is not None and expected is not None and actual != expected:
            report.differs(values[ref], actual, expected, subject)

    for phase in plan.phases:
        for binding in phase.updates:
            agree(binding.value, states[binding.name], f"state `{binding.name}`")
        for stage in phase.stages:
            if isinstance(stage, graph.ElasticStage):
                agree(stage.operand, stage.center, "its center")
            if isinstance(stage, graph.ExchangeStage):
                agree(stage.gradient, stage.states[0], "the weights that it is exchanged into")
    _given_for_results(plan, shapes, inferred, report)


def _given_for_results(
    plan: graph.Plan, shapes: Shapes, inferred_leaves: Mapping[graph.Ref, Leaves | None], report: ShapeReport
) -> None:
    """Report CP0705 for passed shapes that contradict the shapes that the plan implies or declares."""
    maps = (s for phase in plan.phases for s in phase.stages if isinstance(s, graph.MapStage))
    mapped = {ref for stage in maps if plan.fn(stage.fn).body is None for ref in stage.results}
    open_ = {*plan.inputs, *plan.states, *mapped}
    free = {value.name for value in plan.values if value.id in open_ and is_tree(value)}
    free |= set(map(graph.name_of, fragments(plan)))
    for value in plan.values:
        passed, inferred = shapes.get(value.name), inferred_leaves[value.id]
        if passed is None or inferred is None or value.name in free:
            continue
        if passed != inferred:
            subject = "the plan implies" if is_tree(value) else "the plan declares"
            report.differs(value, passed, inferred, subject)


def fragments(plan: graph.Plan) -> set[graph.Ref]:
    """The values of phases in fragments. Passed shapes are those of whole values, and not of fragments."""
    in_fragments = (phase for phase in plan.phases if phase.fragments > 1)
    return {ref for phase in in_fragments for stage in phase.stages for ref in graph.results(stage)}


def check_leaves(
    plan: graph.Plan, values: Mapping[graph.Ref, Value], sizes: Mapping[str, int]
) -> list[Diagnostic]:
    """Check the leaf types of a plan whose shapes are bound.

    Returns:
        Diagnostics of means and elastic pulls of leaves that are no floats (CP0704), sums of bools (CP0721),
        native sums with a wider accumulator (CP0606), scalars drawn separately for each shard (CP0758),
        operands that do not fit a built-in function (CP0218), violated rules of stages (CP0429), and options
        without effect (CP0613, CP0614).
    """
    problems: list[Diagnostic] = []
    for stage in (stage for phase in plan.phases for stage in phase.stages):
        violation = builtin_misfit(plan, stage, values)
        if violation is not None:
            problems.append(violation.diagnostic("CP0218", stage.span, plan.file))
        if isinstance(stage, StageOverAxes):
            leaves = [(leaf.label(stage.operand), leaf) for leaf in values[stage.operand].leaves]
            violation = stage.leaf_violation(leaves, lambda axes: math.prod(sizes[axis] for axis in axes))
            if violation is not None:
                problems.append(violation.diagnostic("CP0429", stage.span, plan.file))
        problems += _idle_options(stage, values, plan.file)
        match stage:
            case graph.Reduce() | graph.Scatter():
                operand, how = stage.operand, stage.op.name
            case graph.ExchangeStage():
                operand, how = stage.gradient, stage.op.name
            case graph.ElasticStage():
                operand, how = stage.operand, "elastic"
            case graph.MapStage() if plan.fn(stage.fn).random and not stage.per_record:
                cut = [values[ref] for ref in stage.results if values[ref].placement.split]
                for label in (
                    leaf.label(value.id) for value in cut for leaf in value.leaves if not leaf.shape
                ):
                    message = f"{label} is a scalar, but each part of the split value would draw another one"
                    problems.append(Diagnostic("CP0758", message, stage.span, file=plan.file))
                continue
            case _:
                continue
        wrong: dict[str, Diagnostic] = {}
        for leaf in values[operand].leaves:
            dtype, label = leaf.dtype, leaf.label(operand)
            for code, violation in (
                ("CP0721", rules.reducible_dtype(how, dtype, label, stage.hints)),
                ("CP0704", rules.averageable_dtype(how, dtype, label, stage.hints)),
                ("CP0606", rules.native_accumulator(how, stage.via, stage.hints, dtype, label)),
            ):
                if violation is not None:
                    wrong.setdefault(code, violation.diagnostic(code, stage.span, plan.file))
                    break
        problems += wrong.values()
    return problems


def builtin_misfit(
    plan: graph.Plan, stage: graph.Stage, values: Mapping[graph.Ref, Value]
) -> rules.Violation | None:
    """The rule of the built-in function of `stage`, if it calls one, that its operands violate."""
    fn, refs, _ = stage.function_call() or ("", (), ())
    body = plan.fn(fn).body if refs else None
    if body is None:
        return None
    by_record = isinstance(stage, graph.MapStage) and stage.per_record
    return body.misfit([(graph.name_of(ref), _elements(values[ref], by_record)) for ref in refs])


def _elements(value: Value, by_record: bool) -> Leaves:
    """The whole leaves of an operand, or those of one record."""
    if not by_record or value.kind != "records":
        return value.uncut
    return tuple(Leaf(leaf.path, leaf.shape[1:], leaf.dtype) for leaf in value.leaves)


def _idle_options(stage: Any, values: Mapping[graph.Ref, Value], file: str) -> list[Diagnostic]:
    """Float options of a stage that sends no floats (CP0613), and options without effect (CP0614)."""
    sent = stage.sends()
    if sent is None or not values[sent[0]].leaves:
        return []
    ref, how = sent
    hints: graph.Hints = stage.hints
    dtypes = {leaf.dtype for leaf in values[ref].leaves}
    options = {"wire": hints.wire, "accumulate": hints.accumulate}
    if not any(dtype.is_float for dtype in dtypes):
        named = " and ".join(f"`{name}`" for name, dtype in options.items() if dtype is not None)
        message = f"{named} of `{graph.name_of(ref)}`: it has no float leaf"
        violation = rules.Violation(message, ("integers are sent and added as they are",))
        return [violation.diagnostic("CP0613", stage.span, file)] if named else []
    idle = rules.options_without_effect(how, getattr(stage, "COLLECTIVE", None), stage.via, hints, dtypes)
    return [
        violation._replace(message=f"`{name}` has no effect: {violation.message}").diagnostic(
            "CP0614", stage.span, file
        )
        for name, violation in idle.items()
        if name != "integers" or values[ref].kind != "tree"  # of a plan for any tree
    ]


def check_sizes(plan: graph.Plan, values: Mapping[graph.Ref, Value], ranks: int) -> list[Diagnostic]:
    """Report CP0725 for values with more bytes, over all ranks, than a count can represent."""
    wide: dict[str, Diagnostic] = {}  # by name: once for all values derived from it
    for value in plan.values:
        leaves = values[value.id].uncut
        wrong = next((leaf for leaf in leaves if leaf.size * leaf.dtype.nbytes * ranks > LARGEST), None)
        if wrong is not None:
            label = wrong.label(value.id)
            message = (
                f"{label} has {wrong.size:,} elements: too many bytes over {ranks:,} ranks to be counted"
            )
            notes = (Note(f"its shape is {_show(wrong)}; {LARGEST:,} bytes are the most"),)
            problem = Diagnostic("CP0725", message, value.span, notes, file=plan.file)
            wide.setdefault(value.name, problem)
    return list(wide.values())


def is_tree(value: graph.Value) -> bool:
    kind = value.type
    return isinstance(kind.element if isinstance(kind, RecordsType) else kind, TreeType)


def _show(leaf: Leaf) -> str:
    kind = ArrayType(leaf.dtype, leaf.shape)
    return f"`{leaf.path}` {kind}" if leaf.path else str(kind)
