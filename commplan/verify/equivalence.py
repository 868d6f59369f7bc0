"""A schedule is proved against its plan: both are carried out on the same symbols, and what comes out is
compared.

Every output and every state update of every phase, element by element: which elements of which inputs,
states and loads it is made of, summed over what, from which root, with which coefficient, through which
functions, and through which casts (`ir.symbolic`). What rounding a plan allows, `wire` and `accumulate` at
their stages, may happen and no other. Nothing is enumerated over ranks. Believed, and not looked into: that
a backend's own collectives and the proved chunk programs do what their kind says, and that functions are
what the plan calls them.
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
from commplan.ir.symbolic.terms import Algebra, UnsayableError
from commplan.ir.symbolic.values import ElementRun, SymbolicValue, place
from commplan.ir.symbolic.wording import block_in_words, element, term
from commplan.ir.transfer import ValueTypes
from commplan.verify.plan_graph import check_plan
from commplan.verify.scope import Report


class Reference:
    """What a plan means, for the sizes and shapes that it was compiled for."""

    def __init__(self, origin: Origin, axes: Sequence[Axis]) -> None:
        self.origin = origin
        self.axes = tuple(axes)
        self.algebra = Algebra({axis.name: axis.size for axis in axes if axis.kind is not AxisKind.SERVER})
        self.comparison = TermComparison(self.algebra)
        self.values = {value.id: value for value in origin.values}
        self.matches = _matches(origin, self.values)
        self._phases: dict[str, Interpretation] = {}

    def phase(self, phase: graph.Phase) -> Interpretation:
        """The values of a phase of the plan."""
        interpretation = self._phases.get(phase.name)
        if interpretation is None:
            interpretation = self._phases[phase.name] = self.interpretation(self.values)
            for ref in (*self.origin.plan.inputs, *self.origin.plan.states):
                interpretation.put(ref, self.entry(self.values[ref]))
            for stage in phase.stages:
                _carry_out(interpretation, stage, graph.results(stage))
        return interpretation

    def interpretation(self, values: dict[Ref, Value], *, written_out: bool = False) -> Interpretation:
        fns, algebra = self.origin.plan.fns, self.algebra
        elementwise = frozenset(fn.name for fn in fns if fn.elementwise)
        random = {fn.name: fn.where for fn in fns if fn.random}
        return Interpretation(
            algebra, values, self.matches, elementwise, random, self.values, written_out=written_out
        )

    def line(self, ref: Ref) -> Span | None:
        """The line of the plan that makes a value."""
        makers = (stage for phase in self.origin.plan.phases for stage in phase.stages)
        maker = next((stage for stage in makers if ref in graph.results(stage)), None)
        return maker.span if maker is not None else self.origin.plan.value(ref).span

    def entry(self, value: Value, shard: Ownership | None = None) -> SymbolicValue:
        """A value as it enters a phase: its own elements, on the ranks where its placement puts them.
        `shard`: who keeps the parts of a state that the plan does not cut."""
        where, blank = self.values[value.id].placement, self.interpretation({})
        own = (*where.per, *where.partial)
        if shard is None:
            return blank.fresh_elements(value.id, value, own, where.split)
        owner = self.algebra.owner(shard.axes, shard.owners) if len(shard.owners) == 1 else None
        held = blank.fresh_elements(value.id, self.values[value.id], own, where.split, owner)
        return blank.sliced(held, value, *blank.row(shard.axes, shard.owners))


def _matches(origin: Origin, values: dict[Ref, Value]) -> dict[tuple[str, Paths], LeafMatch]:
    """For the elementwise functions of a plan which leaves go with which, from the shapes of whole values."""
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


def _carry_out(interpretation: Interpretation, step: object, refs: Sequence[Ref]) -> None:
    """Set the results `refs` of a stage or op: undefined, with the reason, if no term describes them."""
    try:
        step.meaning(interpretation)  # type: ignore[attr-defined]
    except UnsayableError as error:
        interpretation.undefined.extend(f"`{ref}`: {error}" for ref in refs)
        for ref in refs:
            term = interpretation.algebra.undefined(str(error))
            interpretation.put(ref, SymbolicValue(interpretation.values[ref], ((), term)))


class Difference(NamedTuple):
    """The first element of which two values differ."""

    leaf: int
    element: int
    expected: str
    found: str


def check_equivalence(
    schedule: Schedule,
    report: Report,
    reference: Reference,
    sound: Schedule | None = None,
    *,
    written_out: bool = True,
) -> None:
    """Report what `schedule`, which is sound by itself, does otherwise than its plan says (CP0766).

    sound: an earlier form of it of which that has been proved; its phases are not proved again. written_out:
    no pass is to come that casts to the types in which a collective is asked to send and add.
    """
    before = len(report.found)
    _check_head(schedule, reference, report)
    if len(report.found) > before:
        return
    alike = sound is not None and sound.state_shards == schedule.state_shards
    known = {id(phase) for phase in sound.phases} if sound is not None and alike else set[int]()
    for phase, planned in zip(schedule.phases, reference.origin.plan.phases, strict=True):
        if id(phase) not in known or (written_out and _is_to_be_written_out(phase)):
            values = {value.id: value for value in (*schedule.entry, *phase.values)}
            interpretation = reference.interpretation(values, written_out=written_out)
            if written_out and not _is_written_out(phase, report):
                continue
            _check_phase(schedule, phase, planned, reference, interpretation, report)


def _is_to_be_written_out(phase: Phase) -> bool:
    """Whether a collective of `phase` is asked to cast, to divide, or to reduce leaves in several ways."""
    asked = (op for op in phase.ops if isinstance(op, Collective))
    return any(op.hints.wire or op.hints.accumulate or op.hints.integers or op.divisor > 1 for op in asked)


def _is_written_out(phase: Phase, report: Report) -> bool:
    """Report collectives that no backend carries out: they divide, or reduce leaves in several ways."""
    before = len(report.found)
    for op in phase.ops:
        if isinstance(op, Collective) and (op.divisor > 1 or op.hints.integers is not None):
            report.add("CP0766", f"`{op.result}` is a mean that no pass has written out", op.span)
    return len(report.found) == before


def check_origin(
    schedule: Schedule, origin: Origin, check_value: Callable[[Value], None], report: Report
) -> None:
    """Report where the plan that a schedule carries is not the one that it names, or does not fit its
    values."""
    plan = origin.plan
    if plan_digest(plan) != schedule.plan_digest:
        report.add("CP0766", "the plan that the schedule carries is not the one that its digest names")
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
    if not report.found:
        fns = {fn.name: fn for fn in plan.fns}
        check_plan(plan, ValueTypes(schedule.axes, values, fns, plan.sources), report)


def _check_head(schedule: Schedule, reference: Reference, report: Report) -> None:
    """Declarations and the frame of every phase are those of the plan."""
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
    if len(report.found):
        return
    shards = {shard.state: shard.ownership for shard in schedule.state_shards}
    if len(shards) < len(schedule.state_shards) or not set(shards) <= set(schedule.states):
        report.add("CP0766", "the schedule says of a state twice who keeps it, or of what is no state")
        return
    types = ValueTypes(schedule.axes, {})
    for state, ownership in shards.items():
        for code, message in types.check_cut(state, ownership.axes, ownership.owners):
            report.add(code, f"of who keeps `{state}`: {message}")
    for value in schedule.entry if not report.found else ():
        shard = shards.get(value.id)
        expected = reference.values[value.id]
        if shard is not None:
            expected = shard.part_of(expected, schedule.axes)
        if value != expected:
            message = f"enters as {_shape(value)}, and in the plan as {_shape(expected)}"
            report.add("CP0766", f"`{value.id}` {message}")


def _frames(phases: Sequence[Phase | graph.Phase]) -> list[tuple[str, str, int]]:
    return [(phase.name, phase.kind, phase.period) for phase in phases]


def _shape(value: Value) -> str:
    first = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in value.leaves[:3])
    return f"{value.kind} {first}{', ..' if len(value.leaves) > 3 else ''} {value.placement}"


def _check_phase(
    schedule: Schedule,
    phase: Phase,
    planned: graph.Phase,
    reference: Reference,
    actual: Interpretation,
    report: Report,
) -> None:
    expected = reference.phase(planned)
    shards = {shard.state: shard.ownership for shard in schedule.state_shards}
    for value in schedule.entry:
        actual.put(value.id, reference.entry(value, shards.get(value.id)))
    for op in phase.ops:
        _carry_out(actual, op, results(op))
    before = len(report.found)
    _check_frame(schedule, phase, planned, reference, report)
    states = {name_of(ref): ref for ref in schedule.states}
    for kind, bindings, wanted in (
        ("output", phase.outputs, planned.outputs),
        ("state", phase.updates, planned.updates),
    ):
        names, expected_names = [b.name for b in bindings], [b.name for b in wanted]
        if names != expected_names:
            message = f"phase `{phase.name}` has the {kind}s {names}, and in the plan {expected_names}"
            report.add("CP0766", message, phase.span)
            continue
        for binding, original in zip(bindings, wanted, strict=True):
            shard = shards.get(states[binding.name]) if kind == "state" else None
            value, whole = actual.values[binding.value], reference.values[original.value]
            shape = whole if shard is None else shard.part_of(whole, schedule.axes)
            where = f"{kind} `{binding.name}` of phase `{phase.name}`"
            if msgspec.structs.replace(value, id=shape.id) != shape:
                span = reference.line(original.value)
                report.add("CP0766", f"{where} is {_shape(value)}, and in the plan {_shape(shape)}", span)
                continue
            if value.kind == "tree" and not value.leaves:
                continue  # without elements there is nothing to compare
            difference = _difference(
                reference, actual.get(binding.value), expected.get(original.value), shard
            )
            if difference is None:
                continue
            path = f", leaf `{shape.leaves[difference.leaf].path}`" if len(shape.leaves) > 1 else ""
            message = f"{where}{path}, element {difference.element}: the plan says {difference.expected}"
            message += f"; the schedule makes {difference.found}"
            report.add("CP0766", message, reference.line(original.value))
    # An op runs even if no output depends on it.
    if actual.undefined and not expected.undefined and len(report.found) == before:
        report.add("CP0766", f"phase `{phase.name}` makes {actual.undefined[0]}", phase.span)


def _check_frame(
    schedule: Schedule, phase: Phase, planned: graph.Phase, reference: Reference, report: Report
) -> None:
    """Report entering values, and values of the plan, that a phase declares otherwise, and loads that it
    reads again: records that a function leaves out are missing in one of the batches alone."""
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
) -> Difference | None:
    """The first element in which two values differ; of a state that some ranks keep, what these keep
    counts."""
    if shard is None:
        return _first(reference, actual, expected)
    blank = reference.interpretation({})
    part = blank.sliced(expected, actual.value, *blank.row(shard.axes, shard.owners))
    if not shard.owners:
        return _first(reference, actual, part)
    for owner in shard.owners:
        root = blank.root(shard.axes, owner)
        pair = [held.renamed(reference.algebra, actual.value, root) for held in (actual, part)]
        difference = _first(reference, *pair)
        if difference is not None:
            return difference
    return None


def _first(reference: Reference, actual: SymbolicValue, expected: SymbolicValue) -> Difference | None:
    compare = reference.comparison
    left, right = actual.uniform, expected.uniform
    if left is not None and right is not None and left[0] == right[0] and compare(left[1], right[1]):
        return None
    if not actual.value.leaves and left is not None and right is not None:  # records of bytes
        return Difference(0, 0, term(right[1]), term(left[1]))
    for index, leaf in enumerate(actual.value.leaves):
        path = leaf.path
        mine, wanted = actual.blocks[index], expected.blocks[index]
        try:
            sides = [*_side_by_side(mine, wanted)]
        except UnsayableError:  # of what a rank holds it is not said which elements these are
            return Difference(index, 0, *(block_in_words(block, path) for block in (wanted, mine)))
        for at, one_run, other_run in sides:
            if not _same(compare, one_run, other_run):
                if mine.rows or wanted.rows:
                    return Difference(index, at, *(block_in_words(block, path) for block in (wanted, mine)))
                words = element(path, at, other_run, one_run), element(path, at, one_run, other_run)
                return Difference(index, at, *words)
    return None


def _same(compare: TermComparison, actual: ElementRun | None, expected: ElementRun | None) -> bool:
    zero = [side is None or not side.term.parts for side in (actual, expected)]
    if actual is None or expected is None or all(zero):
        return all(zero)
    alike = actual[2:5] == expected[2:5] and actual.rows == expected.rows
    return alike and compare(actual.term, expected.term)


def _side_by_side(mine: Block, wanted: Block) -> Iterator[tuple[int, ElementRun | None, ElementRun | None]]:
    """The runs of two leaves, cut where either has an edge."""
    for at, _, runs in aligned((mine, wanted)):
        left, right = (run and place(block, run, at) for block, run in zip((mine, wanted), runs, strict=True))
        yield at, left, right
