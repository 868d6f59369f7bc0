"""The structural verifier of the plan embedded in a schedule, run before `verify.equivalence` executes it.

Error codes are those of ops (`verify.structural`): CP0730 names and definitions, CP0731 types and shapes,
CP0734 axes, CP0735 invalid options of a stage.
"""

from __future__ import annotations

from commplan.ir.plan import Load, Plan, Stage, Value, operands, results
from commplan.ir.refs import Ref, getter
from commplan.ir.stages import StageOverAxes, rules
from commplan.ir.stages.builtins import signature_violation
from commplan.ir.transfer import ValueTypes, Violations, broken
from commplan.ir.types import ArrayType, RecordsType
from commplan.ir.values import Leaf
from commplan.verify.scope import DiagnosticReport


def check_plan(plan: Plan, types: ValueTypes, report: DiagnosticReport) -> None:
    """Report structural errors in `plan`. Its declarations are compared with the schedule's elsewhere.

    Phases are only checked if `report` is empty after the checks of functions and values.

    Args:
        plan: the embedded plan.
        types: the axes with their sizes, and the validated per-rank values.
        report: receives the diagnostics.
    """
    report.unique("values", (value.id for value in plan.values))
    for fn in plan.fns:
        report.refuse("CP0731", signature_violation(fn), fn.span)
    for value in plan.values:
        if not _fits(value, types):
            report.add("CP0731", f"`{value.id}` of the schedule's plan is no {value.type}", value.span)
    defined: set[Ref] = {*plan.inputs, *plan.states}
    for ref in sorted(defined - types.values.keys()):
        report.add("CP0730", f"`{ref}` enters the schedule's plan, but is not declared")
    for phase in plan.phases if not report.diagnostics else ():
        readable = {*plan.inputs, *plan.states}
        for stage in phase.stages:
            for code, message in _stage_violations(stage, plan, types, readable, defined):
                subject = f"`{stage.__struct_config__.tag}` of the schedule's plan"
                report.add(code, f"{subject}: {message}", stage.span)
            readable.update(results(stage))
            defined.update(results(stage))
        for binding in (*phase.outputs, *phase.updates):
            if binding.value not in readable:
                message = f"`{binding.name}` is bound to `{binding.value}`, which the phase does not have"
                report.add("CP0730", f"in the schedule's plan {message}", phase.span)


def _fits(value: Value, types: ValueTypes) -> bool:
    """Whether the per-rank value matches the type that the plan declares."""
    local = types.values[value.id]
    match value.type:
        case ArrayType(dtype, shape):
            return (local.kind, _whole_leaves(value, types)) == ("array", (Leaf("", shape, dtype),))
        case RecordsType(batch, element):
            rows, leaves = max(batch) // types.ranks(value.placement.split), local.leaves
            if isinstance(element, ArrayType):
                leaves = (Leaf("", (rows, *element.shape), element.dtype),)
            same_rows = all(leaf.shape[:1] == (rows,) for leaf in leaves)
            return (local.kind, local.leaves) == ("records", leaves) and same_rows
        case _:
            return local.kind in ("tree", "records")


def _whole_leaves(value: Value, types: ValueTypes) -> tuple[Leaf, ...]:
    """The leaves of a value before splits; those of records have the rows of a whole batch."""
    local = types.values[value.id]
    if local.kind != "records":
        return local.uncut
    return tuple(leaf.rows(types.ranks(value.placement.split)) for leaf in local.leaves)


def _stage_violations(
    stage: Stage, plan: Plan, types: ValueTypes, readable: set[Ref], defined: set[Ref]
) -> Violations:
    """The errors of a stage. If its names are wrong, only these errors.

    Args:
        stage: the stage.
        plan: its plan.
        types: axes and values.
        readable: inputs, states and values defined earlier in the phase.
        defined: inputs, states and values defined so far in any phase.
    """
    name_violations = [*_name_violations(stage, types, readable, defined)]
    yield from name_violations
    if name_violations:
        return
    yield from broken("CP0735", stage.violation(types.ranks))
    if isinstance(stage, StageOverAxes):
        leaves = [(leaf.label(stage.operand), leaf) for leaf in types.values[stage.operand].leaves]
        yield from broken("CP0735", stage.leaf_violation(leaves, types.ranks))
    for ref in getter(type(stage), stage.SCALARS)(stage):
        yield from types.check_scalar(ref)
    for group in stage.same_leaves():
        if len({(plan.value(ref).type, _whole_leaves(plan.value(ref), types)) for ref in group}) > 1:
            yield "CP0731", f"{', '.join(f'`{ref}`' for ref in group)} have different shapes"


def _name_violations(stage: Stage, types: ValueTypes, readable: set[Ref], defined: set[Ref]) -> Violations:
    """The undefined and duplicate names of a stage, and functions with another number of arguments."""
    for ref in operands(stage):
        if ref not in readable:
            yield "CP0730", f"it reads `{ref}`, which the phase does not have"
    makes = results(stage)
    for ref in makes:
        if ref in defined or makes.count(ref) > 1:
            yield "CP0730", f"`{ref}` is made twice"
        elif ref not in types.values:
            yield "CP0730", f"`{ref}` is made but not declared"
    for field in stage.AXES:
        yield from types.check_axes(getter(type(stage), (field,))(stage))
    if isinstance(stage, Load) and stage.source not in types.sources:
        yield "CP0730", f"there is no source `{stage.source}`"
    fn, operand_refs, result_refs = stage.function_call() or ("", (), ())
    if fn in types.fns:
        yield from broken("CP0731", rules.operand_count(fn, len(types.fns[fn].operands), len(operand_refs)))
        yield from broken("CP0731", rules.result_count(fn, len(types.fns[fn].results), len(result_refs)))
    elif result_refs:
        yield "CP0730", f"there is no function `{fn}`"
