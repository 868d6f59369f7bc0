"""Prove that a schedule is equivalent to its plan by executing both on the same symbols.

The proof compares every element of every output and state update of every phase (`ir.symbolic`): the input,
state or load elements that it depends on, the axes that it is summed over, roots, coefficients, functions and
casts. Rounding is permitted only as `wire` and `accumulate` declare it. The proof does not enumerate ranks.

Two assumptions are not checked: that native collectives and proved chunk programs compute what their kind
specifies, and that user functions have the properties that the plan declares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.ir.analysis.optimizer_leaf_match import LeafMatch, leaf_match
from commplan.ir.plan import AxisKind, Ref, name_of
from commplan.ir.refs import base_name
from commplan.ir.schedule import (
    Axis,
    Collective,
    FnType,
    Origin,
    Ownership,
    Phase,
    Read,
    Schedule,
    SourceType,
    Value,
    results,
)
from commplan.ir.serialization.canonical_json import plan_digest
from commplan.ir.symbolic.blocks import Block, aligned
from commplan.ir.symbolic.compare import TermComparison
from commplan.ir.symbolic.interpretation import Interpretation, Paths
from commplan.ir.symbolic.terms import Algebra, InexpressibleError
from commplan.ir.symbolic.values import ElementRun, SymbolicValue, element_run
from commplan.ir.symbolic.wording import block_in_words, element_in_words, term_in_words
from commplan.ir.transfer import ValueTypes
from commplan.verify.plan_graph import check_plan
from commplan.verify.scope import DiagnosticReport


class Reference:
    """The meaning of a plan for fixed axis sizes and value shapes.

    Symbolic values of phases are computed once, and shared by the checks after each pass.

    Args:
        origin: the plan that is embedded in the schedule, with its axis sizes and per-rank values.
        axes: the axes of the schedule.

    Attributes:
        algebra: makes the terms, over the axes that are not servers.
        comparison: compares terms of `algebra`.
        values: the values of the plan, by name.
        matches: for each elementwise function and the leaf paths of its operands and results, the operand
            leaves that each result leaf depends on.
    """

    def __init__(self, origin: Origin, axes: Sequence[Axis]) -> None:
        self.origin = origin
        self.axes = tuple(axes)
        self.algebra = Algebra({axis.name: axis.size for axis in axes if axis.kind is not AxisKind.SERVER})
        self.comparison = TermComparison(self.algebra)
        self.values = {value.id: value for value in origin.values}
        self.matches = _matches(origin, self.values)
        self._phases: dict[str, Interpretation] = {}
        self._expanded: dict[Ref, bool] = {}

    def phase(self, phase: graph.Phase) -> Interpretation:
        """Return the symbolic values of a phase of the plan, after all its stages."""
        interpretation = self._phases.get(phase.name)
        if interpretation is None:
            interpretation = self._phases[phase.name] = self.interpretation(self.values)
            for ref in (*self.origin.plan.inputs, *self.origin.plan.states):
                interpretation.put(ref, self.entry(self.values[ref]))
            for stage in phase.stages:
                _carry_out(interpretation, stage, graph.results(stage))
        return interpretation

    def interpretation(self, values: dict[Ref, Value], *, written_out: bool = False) -> Interpretation:
        """Return an interpretation without symbolic values.

        Args:
            values: the values that its stages or ops make, by name.
            written_out: as in `check_equivalence`.
        """
        fns, algebra = self.origin.plan.fns, self.algebra
        elementwise = frozenset(fn.name for fn in fns if fn.elementwise)
        random = {fn.name: fn.where for fn in fns if fn.random}
        builtins = {fn.name: fn.body for fn in fns if fn.body is not None}
        return Interpretation(
            algebra, values, self.matches, elementwise, random, self.values,
            builtins=builtins, expanded=self._expanded, written_out=written_out,
        )  # fmt: skip

    def line(self, ref: Ref) -> Span | None:
        """Return the location of the stage that makes a value, or else of its declaration."""
        makers = (stage for phase in self.origin.plan.phases for stage in phase.stages)
        maker = next((stage for stage in makers if ref in graph.results(stage)), None)
        return maker.span if maker is not None else self.origin.plan.value(ref).span

    def entry(self, value: Value, shard: Ownership | None = None) -> SymbolicValue:
        """Return the symbolic value of an input or state at the start of a phase.

        Args:
            value: the input or state as the schedule declares it.
            shard: the axes and ranks that store parts of a state that the plan does not split; None for other
                values.
        """
        placement, blank = self.values[value.id].placement, self.interpretation({})
        varying = (*placement.per, *placement.partial)
        if shard is None:
            return blank.fresh_elements(value.id, value, varying, placement.split)
        owner = self.algebra.owner(shard.axes, shard.owners) if len(shard.owners) == 1 else None
        owned = blank.fresh_elements(value.id, self.values[value.id], varying, placement.split, owner)
        return blank.sliced(owned, value, *blank.row(shard.axes, shard.owners))


def _matches(origin: Origin, values: dict[Ref, Value]) -> dict[tuple[str, Paths], LeafMatch]:
    """Match the leaves of operands and results of every elementwise function, by shapes before splits.

    Returns:
        The matches by name of the function and leaf paths, as in `Reference.matches`.
    """
    matches: dict[tuple[str, Paths], LeafMatch] = {}
    elementwise = {fn.name for fn in origin.plan.fns if fn.elementwise}
    for stage in (stage for phase in origin.plan.phases for stage in phase.stages):
        fn, operands, results = stage.function_call() or ("", (), ())
        if fn not in elementwise:
            continue
        whole = [values[ref].uncut for ref in (*operands, *results)]
        paths: Paths = tuple(tuple(leaf.path for leaf in leaves) for leaves in whole)
        matches[fn, paths] = leaf_match(whole[: len(operands)], whole[len(operands) :])
    return matches


def _carry_out(interpretation: Interpretation, stage_or_op: object, refs: Sequence[Ref]) -> None:
    """Execute a stage or op. Its results `refs` become undefined, with a reason, if they have no term."""
    try:
        stage_or_op.meaning(interpretation)  # type: ignore[attr-defined]
    except InexpressibleError as error:
        interpretation.undefined.extend(f"`{ref}`: {error}" for ref in refs)
        for ref in refs:
            term = interpretation.algebra.undefined(str(error))
            interpretation.put(ref, SymbolicValue(interpretation.values[ref], ((), term)))


class ElementDifference(NamedTuple):
    """The first element with different symbolic values.

    Attributes:
        leaf: index of the leaf.
        element: offset of the element in the leaf of one rank, or in a row of it if its rows are compared.
        expected: the value in the plan, in words.
        found: the value in the schedule, in words.
    """

    leaf: int
    element: int
    expected: str
    found: str


def check_equivalence(
    schedule: Schedule,
    report: DiagnosticReport,
    reference: Reference,
    sound: Schedule | None = None,
    *,
    written_out: bool = True,
) -> None:
    """Report each difference between a schedule and its plan (CP0766).

    Args:
        schedule: a schedule without structural errors.
        report: receives the diagnostics.
        reference: the meaning of the plan.
        sound: an earlier version of the schedule that has been proved equivalent; phases that are the same
            object in both are skipped.
        written_out: whether the pipeline is complete, so that all requested casts must exist as ops.
    """
    before = len(report.diagnostics)
    _check_head(schedule, reference, report)
    if len(report.diagnostics) > before:
        return
    same_shards = sound is not None and sound.state_shards == schedule.state_shards
    proved_phases = {id(phase) for phase in sound.phases} if sound is not None and same_shards else set[int]()
    for phase, planned in zip(schedule.phases, reference.origin.plan.phases, strict=True):
        if id(phase) not in proved_phases or (written_out and _is_to_be_written_out(phase)):
            values = {value.id: value for value in (*schedule.entry, *phase.values)}
            interpretation = reference.interpretation(values, written_out=written_out)
            if written_out and not _is_written_out(phase, report):
                continue
            _check_phase(schedule, phase, planned, reference, interpretation, report)


def _is_to_be_written_out(phase: Phase) -> bool:
    """Whether a collective of `phase` requests casts, a division, or several reductions by dtype."""
    collectives = (op for op in phase.ops if isinstance(op, Collective))
    return any(op.hints != op.hints.exact or op.hints.integers or op.divisor > 1 for op in collectives)


def _is_written_out(phase: Phase, report: DiagnosticReport) -> bool:
    """Whether `phase` has no means and no mixed-dtype reductions, which no backend executes; reports them."""
    before = len(report.diagnostics)
    for op in phase.ops:
        if isinstance(op, Collective) and (op.divisor > 1 or op.hints.integers is not None):
            report.add("CP0766", f"`{op.result}` is a mean that no pass has written out", op.span)
    return len(report.diagnostics) == before


def check_origin(
    schedule: Schedule, origin: Origin, check_value: Callable[[Value], None], report: DiagnosticReport
) -> None:
    """Report an embedded plan that differs from the schedule's digest, or that does not fit its values.

    Args:
        schedule: a schedule without other structural errors.
        origin: the embedded plan, with its axis sizes and per-rank values.
        check_value: reports errors of a value to `report`.
        report: receives the diagnostics.
    """
    plan = origin.plan
    if plan_digest(plan) != schedule.plan_digest:
        report.add(
            "CP0766", "the schedule contains a plan with another digest than the schedule's `plan_digest`"
        )
        return
    fitting = [axis.size in (None, size) for axis, size in zip(plan.axes, origin.sizes, strict=False)]
    if len(origin.sizes) != len(plan.axes) or not all(fitting):
        report.add("CP0766", f"the sizes {list(origin.sizes)} are not those of the plan's axes")
        return
    if [(v.id, v.placement) for v in origin.values] != [(v.id, v.placement) for v in plan.values]:
        report.add("CP0766", "the values of the schedule's plan are not those that the plan declares")
        return
    values = {value.id: value for value in origin.values}
    for value in origin.values:
        check_value(value)
    if not report.diagnostics:
        fns = {fn.name: fn for fn in plan.fns}
        check_plan(plan, ValueTypes(schedule.axes, values, fns, plan.sources), report)


def _check_head(schedule: Schedule, reference: Reference, report: DiagnosticReport) -> None:
    """Compare the declarations and the list of phases with those of the plan."""
    plan = reference.origin.plan
    axes = [(axis.name, axis.kind, axis.size) for axis in schedule.axes]
    sizes = reference.origin.sizes
    declared = [(axis.name, axis.kind, size) for axis, size in zip(plan.axes, sizes, strict=False)]
    pairs: list[tuple[object, ...]] = [
        ("name", schedule.plan, plan.name),
        ("axes", axes, declared),
        ("sources", schedule.sources, tuple(SourceType(source.name, source.type) for source in plan.sources)),
        ("functions", schedule.fns, tuple(FnType.from_fn(fn) for fn in plan.fns)),
        ("inputs", schedule.inputs, plan.inputs),
        ("states", schedule.states, plan.states),
        ("phases", *map(_frames, (schedule.phases, plan.phases))),
    ]
    for noun, actual, expected in pairs:
        if actual != expected:
            message = f"the {noun} of the schedule are not those of its plan"
            report.add("CP0766", f"{message}: {actual}, not {expected}")
    if len(report.diagnostics):
        return
    shards = {shard.state: shard.ownership for shard in schedule.state_shards}
    if len(shards) < len(schedule.state_shards) or not set(shards) <= set(schedule.states):
        report.add(
            "CP0766", "the schedule lists owners twice for one state, or for a value that is not a state"
        )
        return
    types = ValueTypes(schedule.axes, {})
    for state, ownership in shards.items():
        for code, message in types.check_cut(state, ownership.axes, ownership.owners):
            report.add(code, f"the owners of `{state}`: {message}")
    for value in schedule.entry if not report.diagnostics else ():
        shard = shards.get(value.id)
        expected = reference.values[value.id]
        if shard is not None:
            expected = shard.part_of(expected, schedule.axes)
        if value != expected:
            message = f"enters as {_shape(value)}, and in the plan as {_shape(expected)}"
            report.add("CP0766", f"`{value.id}` {message}")


def _frames(phases: Sequence[Phase | graph.Phase]) -> list[tuple[str, str, int, int, int]]:
    """The properties of phases that schedule and plan share, apart from stages and ops."""
    return [(x.name, x.kind, x.period, x.fragments, x.hidden) for x in phases]


def _shape(value: Value) -> str:
    """The kind, the first three leaves and the placement of a value, for messages."""
    first = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in value.leaves[:3])
    return f"{value.kind} {first}{', ..' if len(value.leaves) > 3 else ''} {value.placement}"


def _check_phase(
    schedule: Schedule,
    phase: Phase,
    planned: graph.Phase,
    reference: Reference,
    actual: Interpretation,
    report: DiagnosticReport,
) -> None:
    """Execute `phase` on symbols, and report outputs and states that differ from the plan's phase `planned`.

    `actual` is an interpretation of the schedule without symbolic values.
    """
    expected = reference.phase(planned)
    shards = {shard.state: shard.ownership for shard in schedule.state_shards}
    for value in schedule.entry:
        actual.put(value.id, reference.entry(value, shards.get(value.id)))
    for op in phase.ops:
        _carry_out(actual, op, results(op))
    before = len(report.diagnostics)
    _check_frame(schedule, phase, planned, reference, report)

    states = {name_of(ref): ref for ref in schedule.states}
    for kind, bindings, planned_bindings in (
        ("output", phase.outputs, planned.outputs),
        ("state", phase.updates, planned.updates),
    ):
        names, expected_names = [b.name for b in bindings], [b.name for b in planned_bindings]
        if names != expected_names:
            message = f"phase `{phase.name}` has the {kind}s {names}, and in the plan {expected_names}"
            report.add("CP0766", message, phase.span)
            continue
        for binding, original in zip(bindings, planned_bindings, strict=True):
            shard = shards.get(states[binding.name]) if kind == "state" else None
            value, whole = actual.values[binding.value], reference.values[original.value]
            shape = whole if shard is None else shard.part_of(whole, schedule.axes)
            subject = f"{kind} `{binding.name}` of phase `{phase.name}`"
            if msgspec.structs.replace(value, id=shape.id) != shape:
                span = reference.line(original.value)
                report.add("CP0766", f"{subject} is {_shape(value)}, and in the plan {_shape(shape)}", span)
                continue
            if value.kind == "tree" and not value.leaves:
                continue  # no elements to compare
            difference = _difference(
                reference, actual.get(binding.value), expected.get(original.value), shard
            )
            if difference is None:
                continue
            path = f", leaf `{shape.leaves[difference.leaf].path}`" if len(shape.leaves) > 1 else ""
            message = f"{subject}{path}, element {difference.element}: the plan says {difference.expected}"
            message += f"; the schedule makes {difference.found}"
            report.add("CP0766", message, reference.line(original.value))

    # An op runs even if no output depends on it, so it must have a meaning.
    if actual.undefined and not expected.undefined and len(report.diagnostics) == before:
        report.add("CP0766", f"phase `{phase.name}` makes {actual.undefined[0]}", phase.span)


def _check_frame(
    schedule: Schedule, phase: Phase, planned: graph.Phase, reference: Reference, report: DiagnosticReport
) -> None:
    """Report inputs, states and values of a phase that differ from the plan, and loads that are read twice.

    A second read could differ from the first, since records that a function drops are missing from one only.
    """
    loads = Counter(base_name(op.result) for op in phase.ops if isinstance(op, Read))
    for load, reads in loads.items():
        if reads > 1:
            message = f"phase `{phase.name}` reads `{load}` {reads} times, and in the plan once"
            report.add("CP0766", message, phase.span)
    read = {ref for stage in planned.stages for ref in graph.operands(stage)}
    read |= {binding.value for binding in (*planned.outputs, *planned.updates)}
    for noun, refs, declared in (
        ("inputs", phase.inputs, schedule.inputs),
        ("states", phase.states, schedule.states),
    ):
        expected = [ref for ref in declared if ref in read]
        if list(refs) != expected:
            message = f"phase `{phase.name}` lists the {noun} {list(refs)}, and in the plan reads {expected}"
            report.add("CP0766", message, phase.span)
    shards = {name_of(shard.state): shard.ownership for shard in schedule.state_shards}
    for value in phase.values:
        expected = reference.values.get(value.id, value)
        shard = shards.get(name_of(value.id))
        if value != expected and (shard is None or value != shard.part_of(expected, schedule.axes)):
            message = f"`{value.id}` is {_shape(value)}, and in the plan {_shape(expected)}"
            report.add("CP0766", message, reference.line(value.id))


def _difference(
    reference: Reference, actual: SymbolicValue, expected: SymbolicValue, shard: Ownership | None
) -> ElementDifference | None:
    """The first differing element, or None. For a sharded state, each owner's shard is compared."""
    if shard is None:
        return _first_difference(reference, actual, expected)
    blank = reference.interpretation({})
    part = blank.sliced(expected, actual.value, *blank.row(shard.axes, shard.owners))
    if not shard.owners:
        return _first_difference(reference, actual, part)
    for owner in shard.owners:
        root = blank.root(shard.axes, owner)
        pair = [value.renamed(reference.algebra, actual.value, root) for value in (actual, part)]
        difference = _first_difference(reference, *pair)
        if difference is not None:
            return difference
    return None


def _first_difference(
    reference: Reference, actual: SymbolicValue, expected: SymbolicValue
) -> ElementDifference | None:
    """The first element that differs between two values with the same leaves, or None."""
    compare = reference.comparison
    # If all elements have the same term, the blocks of the leaves need not be compared.
    if actual.uniform is not None and expected.uniform is not None:
        (actual_chain, actual_term), (expected_chain, expected_term) = actual.uniform, expected.uniform
        if actual_chain == expected_chain and compare(actual_term, expected_term):
            return None
        if not actual.value.leaves:  # records of bytes
            return ElementDifference(0, 0, term_in_words(expected_term), term_in_words(actual_term))
    for index in range(len(actual.value.leaves)):
        actual_block, expected_block = actual.blocks[index], expected.blocks[index]
        try:
            sides = [*_side_by_side(actual_block, expected_block)]
        except InexpressibleError:  # the element indices of these blocks are unknown
            return ElementDifference(index, 0, block_in_words(expected_block), block_in_words(actual_block))
        for position, actual_run, expected_run in sides:
            if _same(compare, actual_run, expected_run):
                continue
            if actual_block.rows or expected_block.rows:
                words = block_in_words(expected_block), block_in_words(actual_block)
            else:
                words = (
                    element_in_words(expected_run, actual_run),
                    element_in_words(actual_run, expected_run),
                )
            return ElementDifference(index, position, *words)
    return None


def _same(compare: TermComparison, actual: ElementRun | None, expected: ElementRun | None) -> bool:
    """Whether two runs of elements have equal values. None, and a run without terms, are zeros."""
    zero = [side is None or not side.term.parts for side in (actual, expected)]
    if actual is None or expected is None or all(zero):
        return all(zero)
    same_elements = actual.same_source(expected) and actual.rows == expected.rows
    return same_elements and compare(actual.term, expected.term)


def _side_by_side(
    actual: Block, expected: Block
) -> Iterator[tuple[int, ElementRun | None, ElementRun | None]]:
    """The runs of two leaves, split so that their boundaries coincide.

    Yields the column at which both runs start, and the runs; None for columns without a run, which are zero.
    """
    for at, _, runs in aligned((actual, expected)):
        actual_run, expected_run = (
            run and element_run(block, run, at) for block, run in zip((actual, expected), runs, strict=True)
        )
        yield at, actual_run, expected_run
