"""Diagnostics about shapes and types of leaves.

`infer_shapes` collects those of missing and contradictory shapes in a `ShapeReport`. The compiler calls
`check_leaves` and `check_sizes` for values whose shapes are inferred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from commplan.diagnostics import Diagnostic, Note, did_you_mean
from commplan.ir import plan as graph
from commplan.ir.schedule import Leaf, Value
from commplan.ir.stages import StageOverAxes, rules
from commplan.ir.types import LARGEST, ArrayType, RecordsType, TreeType

# The leaves of a whole value, before any split; those of one record for records.
Leaves = tuple[Leaf, ...]
# The leaves that the caller of the compiler passes, by the name of a value or source.
Shapes = Mapping[str, Leaves]


class ShapeReport:
    """Collects diagnostics, at most one per code and name.

    Args:
        file: The file of the plan.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self._problems: list[Diagnostic] = []
        self._reported: set[tuple[str, str]] = set()
        self._missing: dict[str, tuple[graph.Value, str]] = {}

    @property
    def problems(self) -> list[Diagnostic]:
        """All diagnostics in the order of `add`, then one for all missing shapes."""
        return [*self._problems, *self._all_missing()]

    def add(self, code: str, name: str, message: str, *notes: str, value: graph.Value | None = None) -> None:
        """Add a diagnostic about `name`, at the span of `value` if there is one."""
        if (code, name) in self._reported:
            return
        self._reported.add((code, name))
        remarks = tuple(Note(note) for note in notes)
        self._problems.append(Diagnostic(code, message, value and value.span, remarks, file=self.file))

    def missing(self, value: graph.Value, kind: str) -> None:
        """Record a tree whose shapes are neither passed in nor implied.

        Args:
            value: The tree, or a value with the same name.
            kind: The role of the value in words, such as `an input`.
        """
        self._missing.setdefault(value.name, (value, kind))

    def _all_missing(self) -> list[Diagnostic]:
        """One CP0701 for all trees without shapes."""
        if not self._missing:
            return []
        names = [f"`{name}`" for name in self._missing]
        (value, kind), *further = self._missing.values()
        # A kind may end with a comma after a relative clause.
        message = f"no shapes for {names[0]}, {kind} of type tree".replace(",,", ",")
        if further:
            message = f"no shapes for {len(names)} trees: {', '.join(names)}"
        notes = [Note(f"`{other.name}` is {role.rstrip(',')}", other.span) for other, role in further]
        example = ", ".join(f'"{name}": tree' for name in self._missing)
        how = f"pass shapes={{{example}}}, pytrees whose leaves have shape and dtype"
        notes.append(Note(f"{how}; or --shapes MODULE:FUNCTION, which returns them, or a JSON file"))
        return [Diagnostic("CP0701", message, value.span, tuple(notes), file=self.file)]

    def differs(self, value: graph.Value, actual: Leaves, expected: Leaves, subject: str) -> None:
        """Report CP0705: `value` has the leaves `actual`, and `subject` requires `expected`, other leaves.

        The message shows the first difference.
        """
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
    """Report CP0705 for shapes that contradict each other.

    Args:
        plan: The plan.
        shapes: The shapes that were passed in.
        inferred: The leaves of all values of the plan; None for those that could not be inferred.
        report: Receives the diagnostics.
    """
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
    _check_passed(plan, shapes, inferred, report)


def _check_passed(
    plan: graph.Plan, shapes: Shapes, inferred_leaves: Mapping[graph.Ref, Leaves | None], report: ShapeReport
) -> None:
    """Report CP0705 for passed shapes that contradict the shapes that the plan implies or declares."""
    stages = (stage for phase in plan.phases for stage in phase.stages)
    maps = (stage for stage in stages if isinstance(stage, graph.MapStage))
    mapped = {ref for stage in maps if plan.fn(stage.fn).body is None for ref in stage.results}
    # The caller defines the trees of these names. Shapes passed for names in fragments are those of whole
    # values, and are compared there.
    defined_outside = {*plan.inputs, *plan.states, *mapped}
    free = {value.name for value in plan.values if value.id in defined_outside and is_tree(value)}
    free |= set(map(graph.name_of, fragments(plan)))
    for value in plan.values:
        passed, inferred = shapes.get(value.name), inferred_leaves[value.id]
        if passed is None or inferred is None or value.name in free:
            continue
        if passed != inferred:
            subject = "the plan implies" if is_tree(value) else "the plan declares"
            report.differs(value, passed, inferred, subject)


def fragments(plan: graph.Plan) -> set[graph.Ref]:
    """The results of all stages of phases in fragments.

    Shapes that the caller passes for their names are those of whole values, and not of fragments.
    """
    in_fragments = (phase for phase in plan.phases if phase.fragments > 1)
    return {ref for phase in in_fragments for stage in phase.stages for ref in graph.results(stage)}


def check_leaves(
    plan: graph.Plan, values: Mapping[graph.Ref, Value], sizes: Mapping[str, int]
) -> list[Diagnostic]:
    """Check the leaves of a plan whose shapes are bound.

    Args:
        plan: The plan.
        values: Its values as held by one rank, from `infer_shapes.infer`.
        sizes: The number of ranks along each axis.

    Returns:
        Diagnostics, in the order of stages:

        - CP0218: operands that do not fit a built-in function.
        - CP0429: leaves that violate a rule of the stage, such as equal blocks of a swap.
        - CP0606: native sums with a wider accumulator.
        - CP0613, CP0614: float options of stages that send no floats, and options without effect.
        - CP0704: means and elastic pulls of leaves that are no floats.
        - CP0721: sums and means of bools, and reductions of integer types that are only moved.
        - CP0758: random scalars that each shard of a split value would draw separately.
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
        # The operand that is reduced or averaged, and the operator. Other stages are done here.
        match stage:
            case graph.Reduce() | graph.Scatter():
                operand, how = stage.operand, stage.op.name
            case graph.ExchangeStage():
                operand, how = stage.gradient, stage.op.name
            case graph.ElasticStage():
                operand, how = stage.operand, "elastic"
            case graph.MapStage() if plan.fn(stage.fn).random and not stage.per_record:
                split = [values[ref] for ref in stage.results if values[ref].placement.split]
                for label in (
                    leaf.label(value.id) for value in split for leaf in value.leaves if not leaf.shape
                ):
                    message = f"{label} is a scalar, but each part of the split value would draw another one"
                    problems.append(Diagnostic("CP0758", message, stage.span, file=plan.file))
                continue
            case _:
                continue
        wrong: dict[str, Diagnostic] = {}  # the first by code
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
    """The rule that the operands of the built-in function of `stage` violate.

    None if they violate none, or if `stage` calls no built-in function.
    """
    fn, refs, _ = stage.function_call() or ("", (), ())
    body = plan.fn(fn).body if refs else None
    if body is None:
        return None
    by_record = isinstance(stage, graph.MapStage) and stage.per_record
    return body.misfit([(graph.name_of(ref), _elements(values[ref], by_record)) for ref in refs])


def _elements(value: Value, by_record: bool) -> Leaves:
    """The leaves of an operand before any split, or those of one record if `by_record` and it is records."""
    if not by_record or value.kind != "records":
        return value.uncut
    return tuple(Leaf(leaf.path, leaf.shape[1:], leaf.dtype) for leaf in value.leaves)


def _idle_options(stage: Any, values: Mapping[graph.Ref, Value], file: str) -> list[Diagnostic]:
    """CP0613 for float options of a stage that sends no floats; else CP0614 for options without effect."""
    sends = stage.sends()
    if sends is None or not values[sends[0]].leaves:
        return []
    ref, how = sends
    hints: graph.Hints = stage.hints
    dtypes = {leaf.dtype for leaf in values[ref].leaves}
    options = {"wire": hints.codec or hints.wire, "accumulate": hints.accumulate}
    if not any(dtype.is_float for dtype in dtypes):
        named = " and ".join(f"`{name}`" for name, value in options.items() if value is not None)
        message = f"{named} of `{graph.name_of(ref)}`: it has no float leaf"
        violation = rules.Violation(message, ("integers are sent and added as they are",))
        return [violation.diagnostic("CP0613", stage.span, file)] if named else []
    idle = rules.options_without_effect(how, getattr(stage, "COLLECTIVE", None), stage.via, hints, dtypes)
    return [
        violation._replace(message=f"`{name}` has no effect: {violation.message}").diagnostic(
            "CP0614", stage.span, file
        )
        for name, violation in idle.items()
        # A plan for any tree may have `integers` although this tree has no integer leaf.
        if name != "integers" or values[ref].kind != "tree"
    ]


def check_sizes(plan: graph.Plan, values: Mapping[graph.Ref, Value], ranks: int) -> list[Diagnostic]:
    """Check that the bytes of each leaf, times the number of ranks, can be counted in 63 bits.

    Args:
        plan: The plan.
        values: Its values as held by one rank.
        ranks: The number of ranks along all axes.

    Returns:
        One CP0725 for each name with a leaf that is too large.
    """
    wide: dict[str, Diagnostic] = {}  # by name: once for all versions of a value
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
    """Whether `value` is a tree, or records of trees."""
    kind = value.type
    return isinstance(kind.element if isinstance(kind, RecordsType) else kind, TreeType)


def _show(leaf: Leaf) -> str:
    """The path, if any, and the type of `leaf`."""
    kind = ArrayType(leaf.dtype, leaf.shape)
    return f"`{leaf.path}` {kind}" if leaf.path else str(kind)
