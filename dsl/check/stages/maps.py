"""Checks of `map`: functions on records and on whole values, and the limits that sharding sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from msgspec.structs import replace

from commplan.diagnostics import Note, Span, listed
from commplan.dsl import ast
from commplan.dsl.check.builtins import BARE, signature, undeclared_builtin
from commplan.dsl.check.clauses.options import hints
from commplan.dsl.check.context import CheckContext, is_scalar
from commplan.dsl.check.placements import resolve_axes, status
from commplan.dsl.check.scope import PhaseScope
from commplan.ir.plan import AxisKind, Fn, Load, MapStage, Value
from commplan.ir.plan import operands as operands_of
from commplan.ir.plan import results as results_of
from commplan.ir.stages import rules
from commplan.ir.stages.builtins import DEFINITIONS
from commplan.ir.types import ArrayType, Element, Placement, RecordsType, TreeType, Type


def check_map(
    ctx: CheckContext, scope: PhaseScope, statement: ast.StageStmt, expr: ast.MapExpr
) -> MapStage | None:
    """Check `y, ... = map FN(x, ...) [per MEMBER]`, and bind its results.

    Returns:
        The stage, or None after reporting errors.

    Raises:
        MistakeError: After reporting a wrong number of operands or results, a wrong `per`, or operands whose
            batches or placements do not fit together.
    """
    operands = scope.operands(expr.operands)
    per = resolve_axes(ctx, expr.per, (AxisKind.ENSEMBLE,), "an ensemble")
    fn = find_fn(ctx, expr.fn)
    options = hints(ctx, expr.options, "host map" if fn is None or fn.where == "host" else "map")
    if fn is None:
        return None
    check_call(
        ctx, fn, len(expr.operands), len(statement.targets), expr.fn.span, ast.span_of(statement.targets)
    )
    if per and not fn.random:
        message = f"`{fn.name}` is not random, so it differs between members only where its operands do"
        note = "leave `per` out, or declare the fn `random` if it draws numbers"
        ctx.fail("CP0213", message, expr.per[0].span, fn, note)
    if operands is None or per is None:
        return None

    # Check the operands, and bind the results.
    expected = signature(ctx, fn, expr.operands, operands)
    if not _types_match(ctx, expr.operands, operands, fn, expected.operands):
        return None
    loaded = [value for value in operands if isinstance(value.type, RecordsType)]
    _check_batches(ctx, expr, operands)
    placement = _combine_placements(ctx, fn, expr.operands, operands)
    types = _results(ctx, statement, fn, expected.results, loaded[0].type if loaded else None)
    # All results of a call have the same placement. With `per`, they differ between members.
    placement = replace(placement, per=ctx.ordered((*placement.per, *per)))
    results = scope.bind_results(statement.targets, types, placement)

    refs, members = tuple(value.id for value in operands), ctx.ordered(per)
    if options.cache is not None:
        random, sources = _made_of(ctx, scope, fn, refs)
        violation = rules.cacheable(fn.name, random, sources, fn.results, options.cache)
        span = (
            next(item.span for item in expr.options.items if item.key.text == "cache")
            if expr.options
            else None
        )
        if ctx.refuse("CP0615", violation, span or statement.span, fn):
            options = replace(options, cache=None)
    return MapStage(results, fn.name, refs, statement.span, members, per_record=bool(loaded), hints=options)


def _made_of(
    ctx: CheckContext, scope: PhaseScope, fn: Fn, refs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The random functions and the sources that affect the results of `fn` with operands `refs`.

    Functions include `fn`, and the last one is first. Sources are in the order of the phase.
    """
    names, sources, missing = [fn.name], list[str](), set(refs)
    for stage in reversed(scope.stages):
        if missing.isdisjoint(results_of(stage)):
            continue
        missing.update(operands_of(stage))
        if isinstance(stage, MapStage):
            names.append(stage.fn)
        elif isinstance(stage, Load):
            sources.append(stage.source)
    return [name for name in names if ctx.fns[name].random], sources[::-1]


def find_fn(ctx: CheckContext, name: ast.Name) -> Fn | None:
    """The function `name`, declared or built in.

    None after reporting an error, and if its declaration is wrong, which was reported.
    """
    if name.text in DEFINITIONS and not (name.text in ctx.declared or ctx.fns.get(name.text)):
        return None if name.text in ctx.unknown else undeclared_builtin(ctx, name)
    how = "declare it: `fn NAME(TYPES) -> TYPES on host|device`"
    return ctx.look_up(name, ctx.fns, "CP0106", "fn", how, also=BARE)


def check_call(
    ctx: CheckContext, fn: Fn, operands: int, results: int, call: Span, names: Span, *notes: Note
) -> None:
    """Check the numbers of operands and results of a function call.

    Args:
        ctx: The state of the check.
        fn: The function.
        operands: The number of operands in the call.
        results: The number of results that the statement binds.
        call: The location of the function, for errors of operands.
        names: The location of the targets, for errors of results.
        notes: Further notes of errors of operands.

    Raises:
        MistakeError: After reporting CP0207 or CP0208.
    """
    ctx.require("CP0207", rules.operand_count(fn.name, len(fn.operands), operands), call, fn, *notes)
    ctx.require("CP0208", rules.result_count(fn.name, len(fn.results), results), names, fn)


def _types_match(
    ctx: CheckContext,
    names: Sequence[ast.Name],
    operands: Sequence[Value],
    fn: Fn,
    types: tuple[Element, ...],
) -> bool:
    """Check that operands have the expected element types; False after reporting errors.

    Functions on the host also take only loaded values.
    """
    valid = True
    for name, value, expected in zip(names, operands, types, strict=True):
        type_ = value.type
        if fn.where == "host" and not isinstance(type_, RecordsType):
            message = f"`{fn.name}` runs on the host and takes loaded values only, found `{name.text}`"
            note = "a value is loaded from its `load` on, through host fns and `share`"
            ctx.error("CP0210", message, name.span, value, note)
            valid = False
            continue
        element = type_.element if isinstance(type_, RecordsType) else type_
        if element != expected:
            ctx.error("CP0209", f"`{fn.name}` takes {expected} here, found {element}", name.span, value, fn)
            valid = False
    return valid


def _check_batches(ctx: CheckContext, expr: ast.MapExpr, operands: Sequence[Value]) -> None:
    """Check that all loaded operands have the same batch sizes."""
    first: Value | None = None
    for name, value in zip(expr.operands, operands, strict=True):
        if not isinstance(value.type, RecordsType):
            continue
        if first is None:
            first = value
        elif isinstance(first.type, RecordsType) and value.type.batch != first.type.batch:
            message = f"`{name.text}` and `{first.name}` are batches of different sizes"
            note = "a fn on loaded values is applied record by record"
            ctx.fail("CP0211", message, name.span, value, first, note)


def _results(
    ctx: CheckContext, statement: ast.StageStmt, fn: Fn, types: tuple[Element, ...], loaded: Type | None
) -> tuple[Type, ...]:
    """The types of the results of a call.

    Args:
        ctx: The state of the check.
        statement: The statement, for errors.
        fn: The function.
        types: Its result types.
        loaded: The type of a loaded operand; None if there is none.

    Returns:
        `types` for whole values. With a loaded operand, records of them on the host, and arrays with the
        batch as the leading dimension on the device.

    Raises:
        MistakeError: After reporting CP0212 for a function on the device and members with different batches.
    """
    if not isinstance(loaded, RecordsType):
        return types
    if fn.where == "host":
        return tuple(RecordsType(loaded.batch, result) for result in types)
    if len(frozenset(loaded.batch)) > 1:
        message = f"`{fn.name}` runs on the device, and the members' batches differ in size"
        note = f"the operand is {loaded}: its result would have another shape for every member"
        ctx.fail("CP0212", message, statement.expr.span, note, "use a fn on the host here")
    batch = loaded.batch[0]
    return tuple(
        ArrayType(result.dtype, (batch, *result.shape)) if isinstance(result, ArrayType) else TreeType()
        for result in types
    )


def _combine_placements(
    ctx: CheckContext, fn: Fn, names: Sequence[ast.Name], operands: Sequence[Value]
) -> Placement:
    """The placement of the results of `fn` for these operands.

    Raises:
        MistakeError: After reporting operands whose placements do not fit together or the function.
    """
    pairs = tuple(zip(names, operands, strict=True))
    _check_partial(ctx, fn, pairs)
    _check_split(ctx, fn, pairs)
    _check_place(ctx, pairs)
    split = next((value.placement.split for value in operands if value.placement.split), ())
    for name, value in pairs:
        axes = [axis for axis in split if axis in value.placement.per]
        if axes:
            message = f"`{name.text}` differs over {listed(axes)}, but another operand is split"
            note = "each shard would be computed with another value, and would be a shard of nothing"
            ctx.fail("CP0319", message, name.span, value, note)
    per = ctx.ordered(axis for value in operands for axis in value.placement.per)
    partial = operands[0].placement.partial if operands else ()
    server = operands[0].placement.server if operands else None
    return Placement(per, partial, split, server)


Pairs = Sequence[tuple[ast.Name, Value]]  # operands, with their names in the source


def _check_partial(ctx: CheckContext, fn: Fn, pairs: Pairs) -> None:
    """Check partial operands: the function is linear, and all operands are partial over the same axes."""
    partial = next(((name, value) for name, value in pairs if value.placement.partial), None)
    if partial is None:
        return
    name, value = partial
    if not fn.linear:
        message = (
            f"`{name.text}` is partial over {listed(value.placement.partial)}, and `{fn.name}` is not linear"
        )
        note = "reduce the value first; a fn that commutes with the sum can be declared `linear`"
        ctx.fail("CP0303", message, name.span, value, fn, note)
    for other_name, other in pairs:
        for axis in ctx.ordered((*value.placement.partial, *other.placement.partial)):
            if axis in value.placement.partial and axis in other.placement.partial:
                continue
            outlier = other_name if axis not in other.placement.partial else name
            outlier_value = other if outlier is other_name else value
            message = (
                f"`{outlier.text}` is {status(outlier_value.placement, axis)} over `{axis}`, but another "
                "operand is partial"
            )
            note = "terms of a sum combine with terms of the same sum only: reduce first"
            ctx.fail("CP0304", message, outlier.span, value, other, note)


def _check_split(ctx: CheckContext, fn: Fn, pairs: Pairs) -> None:
    """Check split operands: records may be split, but whole values only for elementwise functions."""
    loaded = [pair for pair in pairs if isinstance(pair[1].type, RecordsType)]
    whole = [pair for pair in pairs if pair not in loaded and not is_scalar(pair[1].type)]
    cut = next((pair for pair in whole if pair[1].placement.split), None)
    if cut is not None and not loaded and not fn.elementwise:
        name, value = cut
        message = (
            f"`{name.text}` is split over {listed(value.placement.split)}, and `{fn.name}` is not elementwise"
        )
        note = (
            "a shard would give another result than the whole (a norm, for one): gather it first, or "
            "declare the fn `elementwise` if it computes each element separately"
        )
        ctx.fail("CP0305", message, name.span, value, fn, note)
    alike = loaded if loaded else whole
    for name, value in alike[1:]:
        if value.placement.split != alike[0][1].placement.split:
            _fail_lists(ctx, name, value, alike[0][1])
    if loaded and cut is not None:
        _fail_lists(ctx, cut[0], cut[1], loaded[0][1], whole=True)


def _fail_lists(
    ctx: CheckContext, name: ast.Name, value: Value, other: Value, *, whole: bool = False
) -> NoReturn:
    """Report that two operands are split differently; `whole` is whether only `other` is records."""
    note = (
        f"`{other.name}` is records and `{name.text}` is a whole value: gather it first"
        if whole
        else "operands of one fn are split over the same axes in the same order, scalars apart"
    )
    ctx.fail("CP0306", f"`{name.text}` and `{other.name}` are not cut alike", name.span, value, other, note)


def _check_place(ctx: CheckContext, pairs: Pairs) -> None:
    """Check that all operands are on the workers, or all on the same server."""
    for name, value in pairs[1:]:
        if value.placement.server != pairs[0][1].placement.server:
            misplaced, other = (name, value) if value.placement.server else pairs[0]
            message = f"`{misplaced.text}` is on `{other.placement.server}`, and the other operands are not"
            note = "only `exchange` and `elastic` bring servers and workers together"
            ctx.fail("CP0318", message, misplaced.span, other, note)
