"""The structural verifier: the invariants of every schedule, checked after each pass and after loading.

CP0730 names and definitions, CP0731 types and shapes, CP0732 bytes and dtypes of collectives, CP0733 order
and dependencies, CP0734 axes and placements, CP0735 invalid options or values of an op; CP0760 to CP0762
input (`verify.input`); CP0764 states on servers (`verify.ownership`); CP0766 equivalence with the plan
(`verify.equivalence`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import msgspec

from commplan.diagnostics import Diagnostic, near_name, with_article
from commplan.ir import roles
from commplan.ir.analysis.input_slice import bind_sources
from commplan.ir.analysis.rounds import late_values
from commplan.ir.ops import shaped_by
from commplan.ir.plan import NO_HINTS, AxisKind, Hints, Plan, Ref
from commplan.ir.roles import Role
from commplan.ir.schedule import (
    SCHEMA_VERSION,
    Collective,
    Decode,
    Elastic,
    Encode,
    Exchange,
    Get,
    Op,
    Put,
    Read,
    Schedule,
    Value,
    operands,
    results,
)
from commplan.ir.shard_shapes import cut_all
from commplan.ir.stages.builtins import signature_violation
from commplan.ir.transfer import Violations, shown
from commplan.ir.types import LARGEST, MOST_SERVERS
from commplan.verify.equivalence import Reference, check_equivalence, check_origin
from commplan.verify.input_proof import check_input
from commplan.verify.scope import Declarations, DiagnosticReport, OpScope

# Names of options that change results, as opposed to performance.
_MEANT = [field.name for field in roles.fields(Hints) if field.role is Role.MEANING]
_MOVES_ROWS = ("all_to_all", "all_gather", "broadcast")  # the collectives of encoded rows
_LANES = re.compile(r"host_read|host_compute|device|network(:.+)?")  # valid lanes of ops


def verify(
    schedule: Schedule,
    sound: Schedule | None = None,
    reference: Reference | None = None,
    *,
    written_out: bool = True,
) -> tuple[Diagnostic, ...]:
    """Return the errors in `schedule`.

    Later checks are omitted if they require a property that earlier checks found to be violated.

    Args:
        schedule: the schedule to verify.
        sound: an earlier version that passed verification. Values and ops that are the same objects in both,
            together with all their values, are skipped: they are immutable, and their context is compared.
            Properties of whole phases are always checked.
        reference: the meaning of the plan, if it is already computed.
        written_out: whether the pipeline is complete (see `check_equivalence`).

    Returns:
        The diagnostics; empty if the schedule is sound and equivalent to its plan.
    """
    report, declarations = DiagnosticReport(schedule.file), Declarations(schedule)

    # Declarations.
    if schedule.schema != SCHEMA_VERSION:
        report.add("CP0735", f"schema version {schedule.schema} is not {SCHEMA_VERSION}")
    report.unique("axes", (axis.name for axis in schedule.axes))
    report.unique("phases", (phase.name for phase in schedule.phases))
    report.unique("sources", (source.name for source in schedule.sources))
    report.unique("functions", (fn.name for fn in schedule.fns))
    for fn in schedule.fns:
        report.refuse("CP0731", signature_violation(fn))
    for axis in schedule.axes:
        most = MOST_SERVERS if axis.kind is AxisKind.SERVER else LARGEST
        if not 1 <= axis.size <= most:
            report.add("CP0734", f"axis `{axis.name}` has size {axis.size}, of at most {most}")
        if axis.levels and math.prod(max(0, spread.count) for spread in axis.levels) < axis.size:
            counts = " x ".join(str(spread.count) for spread in axis.levels)
            report.add("CP0734", f"axis `{axis.name}` has {axis.size} ranks, its levels {counts} places")
    is_repeated = len(declarations.sizes) < len(schedule.axes)
    if is_repeated or any(not 1 <= axis.size <= LARGEST for axis in schedule.axes):
        return tuple(report.diagnostics)  # later checks divide by axis sizes
    entry = tuple(value.id for value in schedule.entry)
    if entry != (*schedule.inputs, *schedule.states):
        report.add("CP0730", "the values on entry are not the inputs and states, in this order")
        return tuple(report.diagnostics)
    for value in schedule.entry:
        check_value(value, declarations, report)
        if value.kind not in ("tree", "array"):
            message = f"`{value.id}` enters the plan as {value.kind}: expected a tree or an array"
            report.add("CP0731", message)

    # Phases. Those of `sound` can be skipped in part if declarations are the same.
    before = {phase.name: phase for phase in sound.phases} if sound and _same_head(schedule, sound) else {}
    for phase in schedule.phases:
        _verify_phase(OpScope(schedule, phase, declarations, report, before.get(phase.name)))
    if not report.diagnostics and any(axis.kind is AxisKind.SERVER for axis in schedule.axes):
        from commplan.verify.ownership import check_servers  # noqa: PLC0415  few plans have servers

        check_servers(schedule, report)

    # The plan.
    if not report.diagnostics and schedule.origin is not None:
        if reference is None:
            check_origin(
                schedule, schedule.origin, lambda value: check_value(value, declarations, report), report
            )
        if not report.diagnostics:
            reference = reference or Reference(schedule.origin, schedule.axes)
            check_equivalence(schedule, report, reference, sound, written_out=written_out)
        if not report.diagnostics:
            _check_stages(schedule, schedule.origin.plan, report)
    return tuple(report.diagnostics)


def _same_head(first: Schedule, second: Schedule) -> bool:
    """Whether axes, sources, functions and entry values, which every phase uses, are equal."""
    return (first.axes, first.sources, first.fns, first.inputs, first.states, first.entry) == (
        second.axes, second.sources, second.fns, second.inputs, second.states, second.entry,
    )  # fmt: skip


def _verify_phase(scope: OpScope) -> None:
    """Check the values, bindings and ops of a phase, and then rules about the phase as a whole."""
    phase, report, schedule = scope.phase, scope.report, scope.schedule
    before = len(report.diagnostics)
    if phase.period < 1:
        report.add("CP0735", f"phase `{phase.name}` has period {phase.period}", phase.span)
    if phase.fragments < 1 or phase.period % phase.fragments or not 0 <= phase.hidden <= phase.interval:
        message = f"has {phase.fragments} fragments and is hidden under {phase.hidden} steps"
        report.add("CP0735", f"phase `{phase.name}` of period {phase.period} {message}", phase.span)
        return
    report.unique("values", (value.id for value in (*schedule.entry, *phase.values)))
    for value in phase.values:
        if not scope.has_seen(value):
            check_value(value, scope.declarations, report)
    _definitions(scope)
    _bindings(scope)
    if len(report.diagnostics) > before:
        return  # later checks require valid definitions
    for op in phase.ops:
        if not scope.has_seen_op(op):
            _check_op(scope, op)
    if len(report.diagnostics) == before:
        if any(value.placement.server is not None for value in scope.values.values()):
            from commplan.verify.ownership import check_served  # noqa: PLC0415

            check_served(scope)
        check_input(scope)
    _clocks(scope)
    _check_late(scope)
    _check_encoded(scope)
    bound = bind_sources(phase)
    if bound != phase:
        message = f"phase `{phase.name}` has wrong lists of values that depend on sources alone"
        report.add("CP0730", message, phase.span)


def _check_late(scope: OpScope) -> None:
    """Report inputs that are read late in a phase that is not hidden, and exchanges of values of them."""
    phase, report, late = scope.phase, scope.report, late_values(scope.phase.ops)
    if late and not phase.hidden:
        report.add("CP0735", f"phase `{phase.name}` is not hidden, but reads inputs at its end", phase.span)
    for op in phase.ops:
        if isinstance(op, Collective) and op.operand in late:
            message = f"`{op.operand}` depends on an input that is read after the steps"
            report.add("CP0735", f"{message}: its {op.kind} is not hidden", op.span)


def _check_encoded(scope: OpScope) -> None:
    """Report ops that read encoded bytes, and neither move whole rows nor decode them."""
    encoded: set[Ref] = set()
    for op in scope.phase.ops:
        wrong = encoded.intersection(operands(op))
        if isinstance(op, Encode) or (isinstance(op, Collective) and op.kind in _MOVES_ROWS and wrong):
            encoded.update(results(op))
        elif wrong and not isinstance(op, Decode):
            scope.report.add("CP0731", f"a {op.title} reads `{min(wrong)}`, which is encoded", op.span)


def _check_op(scope: OpScope, op: Op) -> None:
    """Check the rules of an op, and that its declared results follow from its operands."""
    wrong = [*op.check(scope.types), *_ignored_options(op)]
    if not _LANES.fullmatch(op.lane):
        wrong.append(("CP0735", f"there is no lane `{op.lane}`"))
    if not wrong:
        for result in op.transfer(scope.types):
            wrong += _differences(scope.values[result.id], result)
    for code, message in wrong:
        scope.report.add(code, message, op.span)
    if isinstance(op, Elastic | Exchange | Put | Get):
        from commplan.verify.ownership import check_server_op  # noqa: PLC0415

        check_server_op(scope, op)
    elif isinstance(op, Collective) and not wrong:
        from commplan.verify.algorithms import check_algorithm  # noqa: PLC0415  input has no collectives

        check_algorithm(scope, op)


def _ignored_options(op: Op) -> Violations:
    """The options in `_MEANT` of an op whose kind ignores them, as violations."""
    hints: Hints = getattr(op, "hints", NO_HINTS)
    for name in _MEANT if hints is not NO_HINTS else ():
        if getattr(hints, name) is not None and name not in op.APPLIED_HINTS:
            yield "CP0735", f"`{results(op)[0]}` has the option `{name}`, which no {op.title} has"


def _differences(declared: Value, value: Value) -> Iterator[tuple[str, str]]:
    """Code and message of each difference between a declared result and the computed result `value`."""
    if declared.kind != value.kind:
        yield "CP0731", f"`{declared.id}` is {declared.kind}, expected {value.kind}"
    if declared.leaves != value.leaves:
        message = f"has the leaves {shown(declared.leaves)}, expected {shown(value.leaves)}"
        yield "CP0731", f"`{declared.id}` {message}"
    elif declared.whole != value.whole:
        message = f"is cut from {shown(declared.whole)}, expected {shown(value.whole)}"
        yield "CP0731", f"`{declared.id}` {message}"
    server = declared.placement.server  # determined by the plan
    expected = msgspec.structs.replace(value.placement, server=server)
    if declared.placement != expected:
        yield "CP0734", f"`{declared.id}` is {declared.placement}, expected {expected}"


def _check_stages(schedule: Schedule, plan: Plan, report: DiagnosticReport) -> None:
    """Check that the stages of collectives are stages of the plan."""
    for op in (op for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)):
        for ref in op.stages:
            if plan.stage(ref) is None:
                message = f"`{op.result}` carries out the stage of `{ref}`, which the plan does not have"
                report.add("CP0730", message, op.span)


def _clocks(scope: OpScope) -> None:
    """Report collectives over independent members, since members with more steps would hang."""
    clocks = {op.clock: op for op in scope.phase.ops if isinstance(op, Read) and op.clock is not None}
    if not clocks:
        return
    for op in (op for op in scope.phase.ops if isinstance(op, Collective)):
        for axis in (axis for axis in op.axes if axis in clocks):
            independence = f"with independent clocks (line {clocks[axis].span.line})"
            members = f"`{axis}`, whose members run phase `{scope.phase.name}` {independence}"
            message = f"`{op.result}` meets all of {members}: a member with more steps waits forever"
            scope.report.add("CP0747", message, op.span)


def _definitions(scope: OpScope) -> None:
    """Check single assignment: each value has one defining op, which precedes its readers.

    Also reports declared inputs and states of the phase that the schedule does not have.
    """
    phase, report = scope.phase, scope.report
    declared = {value.id for value in phase.values}
    makers: dict[Ref, int] = {}  # the index of the defining op
    for index, op in enumerate(phase.ops):
        for ref in results(op):
            if ref in makers:
                report.add("CP0730", f"`{ref}` is made twice", op.span)
            elif ref not in declared:
                report.add("CP0730", f"`{ref}` is made but not declared", op.span)
            makers[ref] = index
    for ref in sorted(declared - set(makers)):
        report.add("CP0730", f"`{ref}` is declared but nothing makes it", phase.span)
    entering, schedule = {*phase.inputs, *phase.states}, scope.schedule
    for noun, refs, declared_refs in (
        ("input", phase.inputs, {*schedule.inputs}),
        ("state", phase.states, {*schedule.states}),
    ):
        for ref in (ref for ref in refs if ref not in declared_refs):
            message = f"phase `{phase.name}` reads `{ref}`, which is not {with_article(noun)}"
            report.add("CP0730", message, phase.span)
    for index, op in enumerate(phase.ops):
        for ref in operands(op):
            if ref not in entering:
                _before(scope, op, index, ref, makers, "reads")
        for ref in shaped_by(op):
            if ref not in entering:
                _before(scope, op, index, ref, makers, "is shaped like")
        for ref in op.after:
            _before(scope, op, index, ref, makers, "comes after")


def _before(scope: OpScope, op: Op, index: int, ref: Ref, makers: dict[Ref, int], verb: str) -> None:
    """Report `ref`, which `op` uses as `verb` says, unless an op before `index` defines it."""
    subject = f"`{results(op)[0]}`" if results(op) else "an op without results"
    if ref not in makers:
        meant = near_name(ref, [*makers, *scope.phase.inputs, *scope.phase.states])
        near = f", did you mean `{meant}`?" if meant else ""
        scope.report.add("CP0730", f"{subject} {verb} `{ref}`, which the phase does not have{near}", op.span)
    elif makers[ref] == index:
        scope.report.add("CP0733", f"{subject} {verb} itself: a cycle", op.span)
    elif makers[ref] > index:
        message = f"{subject} {verb} `{ref}`, which is made later: a cycle or a wrong order"
        scope.report.add("CP0733", message, op.span)


def _bindings(scope: OpScope) -> None:
    """Report outputs, updates and arguments with invalid names or values."""
    phase, report = scope.phase, scope.report
    report.unique("outputs", (binding.name for binding in phase.outputs))
    report.unique("updates", (binding.name for binding in phase.updates))
    inside = {value.id for value in phase.values} | {*phase.inputs, *phase.states}
    for binding in (*phase.outputs, *phase.updates, *phase.takes):
        if binding.value not in inside:
            message = f"`{binding.name}` is bound to `{binding.value}`, which the phase does not have"
            report.add("CP0730", message, phase.span)
    for binding in phase.outputs:
        value = scope.values.get(binding.value)
        if value is not None and value.placement.partial:
            report.add("CP0734", f"output `{binding.name}` is partial", phase.span)
    for binding in phase.updates:
        state = scope.values.get(scope.declarations.states.get(binding.name, ""))
        value = scope.values.get(binding.value)
        if state is None:
            report.add("CP0730", f"`{binding.name}` is updated, but is not a state", phase.span)
        elif value is not None and (value.kind, value.leaves) != (state.kind, state.leaves):
            message = f"state `{binding.name}` is updated with a value of other shapes"
            report.add("CP0731", message, phase.span)


def check_value(value: Value, declarations: Declarations, report: DiagnosticReport) -> None:
    """Report errors in the placement of a value, and leaves that fit neither its kind nor its placement."""
    valid = declarations.valid_placements
    if value.placement not in valid and not _check_placement(value, declarations.kinds, report):
        valid.add(value.placement)
    if any(size < 0 for leaf in (*value.leaves, *value.whole) for size in leaf.shape):
        report.add("CP0731", f"`{value.id}` has a negative dimension")
        return
    if any(leaf.nbytes > LARGEST for leaf in (*value.leaves, *value.whole)):
        report.add("CP0731", f"`{value.id}` has more bytes than can be counted")
        return
    report.unique("paths", (leaf.path for leaf in value.leaves))
    match value.kind:
        case "flat" if len(value.leaves) != 1 or len(value.leaves[0].shape) != 1:
            report.add("CP0731", f"`{value.id}` is flat, but is not one leaf of one dimension")
        case "array" if len(value.leaves) != 1:
            report.add("CP0731", f"`{value.id}` is an array, but has {len(value.leaves)} leaves")
        case "tree" | "array":
            _check_whole(value, declarations, report)
        case _:
            pass


def _check_whole(value: Value, declarations: Declarations, report: DiagnosticReport) -> None:
    """Report uncut leaves that do not yield the leaves of one rank when they are split."""
    ways = [declarations.sizes.get(axis, 1) for axis in value.placement.split]
    if not ways:
        if value.whole:
            report.add("CP0731", f"`{value.id}` has uncut leaves, but is not split")
        return
    if cut_all(value.kind, value.whole, ways) != value.leaves:
        report.add("CP0731", f"`{value.id}` does not have the shapes of its uncut leaves cut {ways} ways")


def _check_placement(value: Value, kinds: Mapping[str, AxisKind], report: DiagnosticReport) -> bool:
    """Report errors in the placement of `value`; returns whether there are any."""
    placement, before = value.placement, len(report.diagnostics)
    for axis in placement.varying:
        if axis not in kinds:
            report.add("CP0734", f"`{value.id}` is placed over axis `{axis}`, which the plan does not have")
        elif kinds[axis] is AxisKind.SERVER:
            report.add("CP0734", f"`{value.id}` is placed over `{axis}`, which is a server and not an axis")
    if len(set(placement.varying)) != len(placement.varying):
        report.add("CP0734", f"`{value.id}` names an axis twice: {placement}")
    if placement.server is not None and kinds.get(placement.server) is not AxisKind.SERVER:
        report.add("CP0734", f"`{value.id}` is placed on `{placement.server}`, which is not a server")
    return len(report.diagnostics) > before
