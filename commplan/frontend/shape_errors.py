"""What can be wrong with shapes, and how it is said."""

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
    """Collects problems, each said once for a name."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._problems: list[Diagnostic] = []
        self._said: set[tuple[str, str]] = set()
        self._missing: dict[str, tuple[graph.Value, str]] = {}

    @property
    def problems(self) -> list[Diagnostic]:
        return [*self._problems, *self._all_missing()]

    def add(self, code: str, name: str, message: str, *notes: str, value: graph.Value | None = None) -> None:
        if (code, name) in self._said:
            return
        self._said.add((code, name))
        remarks = tuple(Note(note) for note in notes)
        self._problems.append(Diagnostic(code, message, value and value.span, remarks, file=self.file))

    def missing(self, value: graph.Value, kind: str) -> None:
        """Shapes that nothing gives and nothing implies."""
        self._missing.setdefault(value.name, (value, kind))

    def _all_missing(self) -> list[Diagnostic]:
        """CP0701, once for all trees."""
        if not self._missing:
            return []
        names = [f"`{name}`" for name in self._missing]
        (value, kind), *others = self._missing.values()
        message = f"no shapes are given for {names[0]}, {kind} of type tree".replace(",,", ",")
        if others:
            message = f"no shapes are given for {len(names)} trees: {', '.join(names)}"
        notes = [Note(f"`{other.name}` is {role.rstrip(',')}", other.span) for other, role in others]
        given = ", ".join(f'"{name}": tree' for name in self._missing)
        how = f"pass shapes={{{given}}}, pytrees whose leaves have shape and dtype; to the command"
        notes.append(Note(f"{how} --shapes MODULE:FUNCTION, which returns them, or a JSON file"))
        return [Diagnostic("CP0701", message, value.span, tuple(notes), file=self.file)]

    def differs(self, value: graph.Value, actual: Leaves, expected: Leaves, who: str) -> None:
        """CP0705: two shapes for one thing; the first difference is shown."""
        pairs = zip(actual, expected, strict=False)
        first = next(
            (f"expected {_show(b)}, found {_show(a)}" for a, b in pairs if a != b),
            f"expected {len(expected)} leaves, found {len(actual)}",
        )
        message = f"`{value.name}` has other shapes than {who}"
        self.add("CP0705", value.name, message, first, "give one set of shapes, or another name", value=value)


def check_names(plan: graph.Plan, shapes: Shapes, report: ShapeReport) -> None:
    """Every name in `shapes` must be one of the plan's values or sources (CP0702)."""
    known = sorted({value.name for value in plan.values} | {source.name for source in plan.sources})
    for name in shapes:
        if name in known:
            continue
        hint = did_you_mean(name, known, "its values are:")
        report.add("CP0702", name, f"shapes are given for `{name}`, which the plan does not have", hint)


def check_agreement(
    plan: graph.Plan, shapes: Shapes, known: Mapping[graph.Ref, Leaves | None], report: ShapeReport
) -> None:
    """Shapes that are given or declared twice, or that must be equal, are (CP0705)."""
    values = {value.id: value for value in plan.values}
    states = {values[ref].name: ref for ref in plan.states}

    def agree(ref: graph.Ref, like: graph.Ref, who: str) -> None:
        actual, expected = known[ref], known[like]
        if actual is not None and expected is not None and actual != expected:
            report.differs(values[ref], actual, expected, who)

    for phase in plan.phases:
        for binding in phase.updates:
            agree(binding.value, states[binding.name], f"state `{binding.name}`")
        for stage in phase.stages:
            if isinstance(stage, graph.Elastic):
                agree(stage.operand, stage.center, "its centre")
            if isinstance(stage, graph.Exchange):
                agree(stage.gradient, stage.states[0], "the weights that it is exchanged into")
    _given_for_results(plan, shapes, known, report)


def _given_for_results(
    plan: graph.Plan, shapes: Shapes, known: Mapping[graph.Ref, Leaves | None], report: ShapeReport
) -> None:
    """Shapes given for what the plan implies or declares must be what it implies or declares."""
    mapped = {ref for ph in plan.phases for s in ph.stages if isinstance(s, graph.Map) for ref in s.results}
    open_ = {*plan.inputs, *plan.states, *mapped}
    free = {value.name for value in plan.values if value.id in open_ and is_tree(value)}
    for value in plan.values:
        given, inferred = shapes.get(value.name), known[value.id]
        if given is None or inferred is None or value.name in free:
            continue
        if given != inferred:
            who = "the plan implies" if is_tree(value) else "the plan declares"
            report.differs(value, given, inferred, who)


def check_leaves(
    plan: graph.Plan, values: Mapping[graph.Ref, Value], sizes: Mapping[str, int]
) -> list[Diagnostic]:
    """Means and elastic pulls need float leaves (CP0704); truth values have no sum (CP0721); a sum of the
    backend's own is as wide as what travels (CP0606); what each part draws is no scalar of all (CP0758); and
    the rules of the stages themselves (CP0429); options have an effect (CP0613, CP0614)."""
    problems: list[Diagnostic] = []
    for stage in (stage for phase in plan.phases for stage in phase.stages):
        if isinstance(stage, StageOverAxes):
            leaves = [(leaf.label(stage.operand), leaf) for leaf in values[stage.operand].leaves]
            misfit = stage.misfit(leaves, lambda axes: math.prod(sizes[axis] for axis in axes))
            if misfit is not None:
                problems.append(misfit.diagnostic("CP0429", stage.span, plan.file))
        problems += _idle_options(stage, values, plan.file)
        match stage:
            case graph.Reduce() | graph.Scatter():
                operand, how = stage.operand, stage.op.name
            case graph.Exchange():
                operand, how = stage.gradient, stage.op.name
            case graph.Elastic():
                operand, how = stage.operand, "elastic"
            case graph.Map() if plan.fn(stage.fn).random and not stage.per_record:
                cut = [values[ref] for ref in stage.results if values[ref].placement.split]
                for label in (
                    leaf.label(value.id) for value in cut for leaf in value.leaves if not leaf.shape
                ):
                    message = f"{label} is a scalar, of which each part of what is cut would draw its own"
                    problems.append(Diagnostic("CP0758", message, stage.span, file=plan.file))
                continue
            case _:
                continue
        wrong: dict[str, Diagnostic] = {}
        for leaf in values[operand].leaves:
            dtype, label = leaf.dtype, leaf.label(operand)
            for code, broken in (
                ("CP0721", rules.numbers(how, dtype, label, stage.hints)),
                ("CP0704", rules.floats(how, dtype, label, stage.hints)),
                ("CP0606", rules.native_sum(how, stage.via, stage.hints, dtype, label)),
            ):
                if broken is not None:
                    wrong.setdefault(code, broken.diagnostic(code, stage.span, plan.file))
                    break
        problems += wrong.values()
    return problems


def _idle_options(stage: Any, values: Mapping[graph.Ref, Value], file: str) -> list[Diagnostic]:
    """Options for floats of a stage that sends none (CP0613), and options that change nothing (CP0614)."""
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
        broken = rules.Violation(message, ("integers are sent and added as they are",))
        return [broken.diagnostic("CP0613", stage.span, file)] if named else []
    idle = rules.idle_options(how, getattr(stage, "COLLECTIVE", None), stage.via, hints, dtypes)
    return [
        broken._replace(message=f"`{name}` has no effect: {broken.message}").diagnostic(
            "CP0614", stage.span, file
        )
        for name, broken in idle.items()
        if name != "integers" or values[ref].kind != "tree"  # of a plan for any tree
    ]


def check_sizes(plan: graph.Plan, values: Mapping[graph.Ref, Value], ranks: int) -> list[Diagnostic]:
    """No value has more bytes, over all ranks, than can be counted (CP0725)."""
    wide: dict[str, Diagnostic] = {}  # by name: once for all the values that follow from it
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
