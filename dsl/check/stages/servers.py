"""Checks of `exchange` and `elastic`: stages that update states on workers or on servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from commplan.diagnostics import Note, Span, listed, plural
from commplan.dsl import ast
from commplan.dsl.check.builtins import signature
from commplan.dsl.check.clauses.axes import check_on_workers, stage_axes
from commplan.dsl.check.clauses.ops import check_operand, check_scalar, sum_or_mean, written_call
from commplan.dsl.check.clauses.options import hints
from commplan.dsl.check.clauses.via import algorithm, check_accumulation
from commplan.dsl.check.context import Axes, CheckContext, is_scalar
from commplan.dsl.check.numbers import written
from commplan.dsl.check.placements import Status, status
from commplan.dsl.check.scope import PhaseScope
from commplan.dsl.check.stages.maps import check_call, find_fn
from commplan.ir.plan import ElasticStage, ExchangeStage, Fn, Ref, Value
from commplan.ir.stages import rules
from commplan.ir.types import ArrayType, ElasticMode, Placement

# The code of the error for an operand that has this placement and should have another.
STATUS_CODES: dict[Status, str] = {"same": "CP0302", "split": "CP0314", "partial": "CP0315", "per": "CP0316"}
# The words after `by` in an `elastic` stage.
MODES: tuple[ElasticMode, ...] = get_args(ElasticMode)


def check_exchange(
    ctx: CheckContext, scope: PhaseScope, statement: ast.StageStmt, expr: ast.ExchangeExpr
) -> ExchangeStage | None:
    """Check `w [, m] = exchange g into w [, m] with FN over AXES by OP`, and bind its results.

    Returns:
        The stage, or None after reporting errors.

    Raises:
        MistakeError: After reporting parts that do not fit together.
    """
    # Check each clause before the first return, to report all errors in one run.
    gradient = scope.operand(expr.gradient)
    states = _states(ctx, scope, expr.states)
    fn = find_fn(ctx, expr.fn)
    over = stage_axes(ctx, expr.over, "exchange")
    by = sum_or_mean(ctx, scope, expr.by, expr.span, "exchange")
    server = states[0].placement.server if states else None
    via = algorithm(ctx, expr.via, "exchange", over, server)
    options = hints(ctx, expr.options, "exchange", gradient.type if gradient else None)
    if len(expr.states) > 2:
        message = f"`exchange` updates one or two states, found {len(expr.states)}"
        note = "`w, m`: put the state of the optimizer into one tree"
        ctx.fail("CP0422", message, expr.states[2].span, note)
    if states is None:
        return None

    # Check that the parts fit together.
    _check_targets(ctx, statement.targets, expr.states)
    if gradient is None or over is None:
        return None
    _check_terms(ctx, expr, gradient, over)
    _check_states(ctx, expr, states, over)
    if fn is None:
        return None
    _check_fn(ctx, expr, fn, states, gradient)
    if by is None:
        return None
    check_operand(ctx, by, gradient)

    # A state varies over the axes over which any operand varies after the sum.
    reduced = gradient.placement.same_over(over)
    results: list[Ref] = []
    for name, state in zip(statement.targets, states, strict=True):
        per = ctx.ordered((*reduced.per, *(axis for s in states for axis in s.placement.per)))
        results.append(scope.bind(name, state.type, Placement(per, server=server)))
    refs, span = tuple(state.id for state in states), statement.span
    return ExchangeStage(
        tuple(results), gradient.id, refs, fn.name, over, by.op, span, via=via, hints=options
    )


def _states(ctx: CheckContext, scope: PhaseScope, names: Sequence[ast.Name]) -> tuple[Value, ...] | None:
    """The current values of the named states, or None after reporting errors."""
    valid = True
    for name in names:
        if name.text in ctx.unknown or name.text in ctx.states:
            continue
        kind = ctx.kind_of(name.text)
        value = scope.operand(name)
        valid = False
        if value is None:
            continue  # reported, here or before
        message = f"`{name.text}` is {kind or 'a value of this phase'}, expected a state"
        note = "the updated value must carry over to the next step: declare it `state`"
        ctx.error("CP0422", message, name.span, note)
    return scope.operands(names) if valid else None


def _check_targets(ctx: CheckContext, targets: Sequence[ast.Name], states: Sequence[ast.Name]) -> None:
    """Check that an exchange binds the states that it takes, in the same order."""
    state_names = [name.text for name in states]
    if [name.text for name in targets] == state_names:
        return
    pairs = zip(targets, state_names, strict=False)
    wrong = next((target for target, state_name in pairs if target.text != state_name), targets[-1])
    note = f"found {listed(name.text for name in targets)}; write `{', '.join(state_names)} = exchange ...`"
    ctx.fail(
        "CP0423", f"`exchange` returns the states that it takes: {listed(state_names)}", wrong.span, note
    )


def _check_status(
    ctx: CheckContext, name: ast.Name, value: Value, over: Sequence[ast.Name], expected: Status, *why: str
) -> None:
    """Check that a value has placement `expected` along all of `over`.

    Args:
        ctx: The state of the check.
        name: The value in the source.
        value: The value.
        over: The axes.
        expected: The placement.
        why: The end of the error message, then notes. `{}` in them is replaced by the axis.

    Raises:
        MistakeError: After reporting the first axis with another placement.
    """
    for axis in over:
        actual = status(value.placement, axis.text)
        if actual != expected:
            reason, *fix = (text.format(axis.text) for text in why)
            message = f"`{name.text}` is {actual} over `{axis.text}`, and {reason}"
            ctx.fail(STATUS_CODES[actual], message, axis.span, value, *fix)


def _check_terms(ctx: CheckContext, expr: ast.ExchangeExpr, gradient: Value, over: Axes) -> None:
    """Check that the gradient is partial over exactly the axes of the stage, and split over none."""
    check_on_workers(ctx, expr.gradient, gradient, "exchange")
    why = "`exchange` adds terms that are partial over it"
    _check_status(ctx, expr.gradient, gradient, expr.over, "partial", why)
    partial, split = gradient.placement.partial, gradient.placement.split
    axis = next((axis for axis in (*partial, *split) if axis not in over), None)
    if axis is not None:
        code, remedy = "CP0314", "gather it first"
        if axis in partial:
            code, remedy = "CP0303", f"add `{axis}` to the axes of the exchange"
        message = f"`{expr.gradient.text}` would stay {status(gradient.placement, axis)} over `{axis}`"
        ctx.fail(code, message, expr.gradient.span, gradient, f"the update needs whole values: {remedy}")


def _check_states(ctx: CheckContext, expr: ast.ExchangeExpr, states: Sequence[Value], over: Axes) -> None:
    """Check that the states have the same home and are the same on all ranks of the exchange."""
    violation = rules.common_home([(state.name, state.placement.server) for state in states])
    if violation is not None:
        index = violation.at
        notes = states[index], states[0]
        ctx.require("CP0424", violation, expr.states[index].span, *notes)
    for name, state in zip(expr.states, states, strict=True):
        spread = [axis for axis in state.placement.varying if axis in over] or [*state.placement.split]
        if spread:
            message = (
                f"`{name.text}` is {status(state.placement, spread[0])} over `{spread[0]}`, and all ranks "
                "of an exchange get the same state"
            )
            note = f"declare it without `{spread[0]}`: the compiler divides the work among owners"
            ctx.fail("CP0424", message, name.span, state, note)


def _check_fn(
    ctx: CheckContext, expr: ast.ExchangeExpr, fn: Fn, states: Sequence[Value], gradient: Value
) -> None:
    """Check the update function: `FN(w [, m], g) -> w [, m]`, elementwise and on the device."""
    values = (*states, gradient)
    note = Note(f"the exchange passes {listed(value.name for value in values)}")
    check_call(ctx, fn, len(values), len(states), expr.fn.span, expr.fn.span, note)
    update = rules.update_function(fn.name, fn.where, elementwise=fn.elementwise, random=fn.random)
    ctx.require("CP0214", update, expr.fn.span, fn)
    names = (*expr.states, expr.gradient)
    types = signature(ctx, fn, names, values).operands
    for name, value, type_ in zip(names, values, types, strict=True):
        if value.type != type_:
            ctx.fail("CP0209", f"`{fn.name}` takes {type_} here, found {value.type}", name.span, value, fn)


class Coefficient(msgspec.Struct, frozen=True):
    """`eta` or `rho` of an elastic average.

    Attributes:
        argument: The literal, or the id of a scalar value.
        span: Its location.
        value: The scalar value; None for a literal.
    """

    argument: float | Ref
    span: Span
    value: Value | None = None


def check_elastic(
    ctx: CheckContext, scope: PhaseScope, statement: ast.StageStmt, expr: ast.ElasticExpr
) -> ElasticStage | None:
    """Check `d, c = elastic w with c over AXES by MODE(eta = .., rho = ..)`, and bind its results.

    Returns:
        The stage, or None after reporting errors.

    Raises:
        MistakeError: After reporting parts that do not fit together.
    """
    # Check each clause before the first return, to report all errors in one run.
    operand = scope.operand(expr.operand)
    centers = _states(ctx, scope, (expr.center,))
    over = stage_axes(ctx, expr.over, "elastic")
    by = written_call(ctx, expr.by, "mode", MODES)
    mode = _mode(ctx, expr, by)
    coefficients = _coefficients(ctx, scope, by, mode) if by and mode else None
    stage = f"elastic {mode}" if mode else "elastic sync"
    type_ = operand.type if operand else None
    # The valid algorithms and options depend on the mode.
    via = algorithm(ctx, expr.via if mode else None, stage, over)
    options = hints(ctx, expr.options if mode else None, stage, type_)
    check_accumulation(ctx, expr.via, "elastic", via, options, operand)
    if by and mode and coefficients and over:
        eta, rho = (coefficient.argument for coefficient in coefficients)
        if not ctx.refuse("CP0425", rules.coefficients(eta, rho), by.span):
            ctx.refuse("CP0426", rules.stability(mode, eta, rho, over, ctx.size), by.span)
    if centers is None:
        return None

    # Check that the parts fit together, and bind the results.
    _check_pull_and_center(ctx, statement, expr)
    if operand is None or over is None:
        return None
    center = centers[0]
    _check_replicas(ctx, expr, operand)
    _check_center(ctx, expr, operand, center, over, mode)
    if mode is None or coefficients is None:
        return None
    for key, coefficient in zip(("eta", "rho"), coefficients, strict=True):
        if coefficient.value:
            check_scalar(ctx, coefficient.value, operand, coefficient.span, f"`{key}`", "CP0425")
    pull = scope.bind(statement.targets[0], operand.type, operand.placement)
    result = scope.bind(statement.targets[1], center.type, center.placement)
    eta, rho = (coefficient.argument for coefficient in coefficients)
    return ElasticStage(
        pull, result, operand.id, center.id, over, mode, eta, rho, statement.span, via, options
    )


def _check_pull_and_center(ctx: CheckContext, statement: ast.StageStmt, expr: ast.ElasticExpr) -> None:
    """Check that an `elastic` stage binds two names, and that the second one is its center."""
    targets = statement.targets
    if len(targets) != 2:
        message = f"`elastic` returns the pull and the new center, found {plural(len(targets), 'name')}"
        ctx.fail("CP0401", message, ast.span_of(targets), f"write `pull, {expr.center.text} = elastic ...`")
    if targets[1].text != expr.center.text:
        message = f"`elastic` returns the center that it takes, `{expr.center.text}`"
        note = f"write `{targets[0].text}, {expr.center.text} = elastic ...`"
        ctx.fail("CP0423", message, targets[1].span, note)


def _mode(ctx: CheckContext, expr: ast.ElasticExpr, by: ast.CallExpr | None) -> ElasticMode | None:
    """The mode of an `elastic` stage, or None after reporting an error. `by` is the call in the clause."""
    if expr.by is None:
        message = "the stage has no mode"
        return ctx.error("CP0402", message, expr.span, f"add `by` with {listed(MODES, 'or')}")
    if by is None:
        return None
    message = f"there is no mode `{by.name.text}`"
    return ctx.choose(by.name, MODES, "CP0404", message, f"the modes are {listed(MODES)}")


def _coefficients(
    ctx: CheckContext, scope: PhaseScope, by: ast.CallExpr, mode: ElasticMode
) -> tuple[Coefficient, Coefficient] | None:
    """`eta` and `rho`, or None if one of them has an error, which was reported."""
    arguments = ctx.keyed(by, ("eta", "rho"), "CP0405")
    if arguments is None:
        return None
    missing = [key for key in ("eta", "rho") if key not in arguments]
    if missing:
        usage = f"write `{mode}(eta = .., rho = ..)`"
        return ctx.error("CP0405", f"`{mode}` needs {listed(missing)}", by.span, usage)
    eta = _coefficient(ctx, scope, arguments["eta"].value, "eta")
    rho = _coefficient(ctx, scope, arguments["rho"].value, "rho")
    return (eta, rho) if eta and rho else None


def _coefficient(
    ctx: CheckContext, scope: PhaseScope, value: ast.Name | ast.Number, key: str
) -> Coefficient | None:
    """The coefficient `key`; None after reporting an error, or if its value has one."""
    if isinstance(value, ast.Number):
        if value.unit is not None:
            return ctx.error("CP0425", f"`{key}` is a positive number, found `{written(value)}`", value.span)
        if ctx.refuse("CP0425", rules.coefficient(key, value.value), value.span):
            return None
        return Coefficient(float(value.value), value.span)
    scalar = scope.operand(value)
    if scalar is None:
        return None
    if not isinstance(scalar.type, ArrayType) or not is_scalar(scalar.type) or not scalar.type.dtype.is_float:
        message = f"`{key}` is a number or a float scalar, found {scalar.type}"
        return ctx.error("CP0425", message, value.span, scalar)
    return Coefficient(scalar.id, value.span, scalar)


def _check_replicas(ctx: CheckContext, expr: ast.ElasticExpr, operand: Value) -> None:
    """Check that the operand of an `elastic` stage differs between ranks, and can be averaged."""
    check_on_workers(ctx, expr.operand, operand, "elastic")
    if isinstance(operand.type, ArrayType):
        violation = rules.averageable_dtype("elastic", operand.type.dtype, f"`{operand.name}`")
        ctx.require("CP0406", violation, expr.operand.span, operand)
    why = "elastic averaging is for workers with different weights"
    _check_status(ctx, expr.operand, operand, expr.over, "per", why, "declare it `per {}`")
    if operand.placement.partial:
        message = f"`{expr.operand.text}` is partial over {listed(operand.placement.partial)}"
        ctx.fail("CP0303", message, expr.operand.span, operand, "reduce it first")


def _check_center(
    ctx: CheckContext,
    expr: ast.ElasticExpr,
    operand: Value,
    center: Value,
    over: Axes,
    mode: ElasticMode | None,
) -> None:
    """Check that the center has the home of its mode, and the operand's type and placement.

    The center is the same over the axes of the stage. `mode` is None if it has an error.
    """
    name = expr.center
    home = rules.center_home(mode, name.text, center.placement.server) if mode else None
    ctx.require("CP0427", home, name.span, center)
    if center.type != operand.type:
        message = f"the center is {center.type}, and `{expr.operand.text}` is {operand.type}"
        ctx.fail("CP0428", message, name.span, center, operand)
    expected = operand.placement.same_over(over)
    actual = Placement(center.placement.per, center.placement.partial, center.placement.split)
    if actual != expected:
        message = (
            f"the center is placed `{actual}`, expected `{expected}`: as `{expr.operand.text}`, but the same "
            f"over {listed(over)}"
        )
        ctx.fail("CP0428", message, name.span, center, operand)
