"""Checks of stages with one operand over some axes.

`commplan.ir.stages.OVER_AXES` has the stages and the placements that each takes and makes.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

from msgspec.structs import replace

from commplan.diagnostics import Note, listed
from commplan.dsl import ast
from commplan.dsl.check.clauses.axes import check_on_workers, collective_axes
from commplan.dsl.check.clauses.ops import WrittenReduction, check_operand, reduction, sum_or_mean
from commplan.dsl.check.clauses.options import hints
from commplan.dsl.check.clauses.via import algorithm, carrying, check_accumulation
from commplan.dsl.check.context import Axes, CheckContext, is_scalar
from commplan.dsl.check.numbers import integer
from commplan.dsl.check.placements import Status, status
from commplan.dsl.check.scope import PhaseScope
from commplan.ir.plan import Stage, Value
from commplan.ir.stages import OVER_AXES, StageOverAxes, rules
from commplan.ir.types import ArrayType, Placement, RecordsType
from commplan.ir.values import Leaf


def check_collective(
    ctx: CheckContext, scope: PhaseScope, statement: ast.StageStmt, expr: ast.StageExpr
) -> Stage | None:
    """Check `y = VERB x over AXES ..`, and bind its result.

    Returns:
        The stage, even after some errors, such as an unknown algorithm of a `reduce`; None if errors leave it
        unknown. For None, the caller binds the target to BAD. If the only errors are surplus clauses or
        targets, or the `via` of a `share`, the result is bound here first, to compare its type and placement
        with those of its state.

    Raises:
        MistakeError: After reporting an operand of the wrong type or placement.
    """
    kind = OVER_AXES[expr.kind]
    # Check all parts of the statement before the first return, to report all errors in one run.
    well_formed = _well_formed(ctx, statement, expr, kind)
    operand = scope.operand(expr.operand)
    over = collective_axes(ctx, scope, expr)
    by = _reduction(ctx, scope, expr)
    via = algorithm(ctx, expr.via, expr.kind, over)
    options = hints(ctx, expr.options, expr.kind, operand.type if operand else None)
    check_accumulation(ctx, expr.via, by and by.op.name, via, options, operand)
    if options.codec is not None:
        violation = rules.block_format(expr.kind, by and by.op.name, via, options.codec)
        if violation is not None:
            # `at` is 1 if `via` violates the rule. Otherwise the verb or the operator in `by` does.
            clause = (expr.via if violation.at == 1 else expr.by) or expr
            ctx.refuse("CP0616", violation, clause.span)
    number = _number(ctx, expr, kind, over)
    if expr.kind == "share" and expr.via is None:
        message = "the share does not say how"
        note = "without a `share` the compiler chooses"
        ctx.error("CP0402", message, expr.span, f"add `via` with {listed(carrying('share'), 'or')}", note)
    if kind.MAKES == "same" and over is not None:
        # Recorded first, and read only if the statement turns out to have errors.
        scope.bad_same[statement.span] = dict.fromkeys(over, statement.targets[0].span)
    if operand is None:
        _check_not_repeated(ctx, scope, statement, expr, kind)
    if operand is None or over is None or number is None:
        return None

    # Check the operand against the stage, and bind the result.
    _check_placement(ctx, scope, statement, expr, kind, operand, by)
    if by is not None:
        check_operand(ctx, by, operand)
    elif expr.kind in ("reduce", "scatter"):
        return None
    target = statement.targets[0]
    result = scope.bind(target, operand.type, _result_placement(kind, operand.placement, over))
    if kind.MAKES == "same":
        scope.mark_same(result, operand.id, over, target.span)
    # A share without a valid `via` has an error already, so its design does not matter.
    if not well_formed or (expr.kind == "share" and via is None):
        return None

    across = expr.over_word.text == "across"
    fields: dict[str, Any] = {
        "result": result, "operand": operand.id, "axes": over, "span": statement.span, "via": via,
        "hints": options, "op": by and by.op, "across": across, **number,
    }  # fmt: skip
    stage = kind(**{name: fields[name] for name in kind.__struct_fields__})
    if isinstance(operand.type, ArrayType):
        leaf = Leaf("", operand.type.shape, operand.type.dtype)
        ctx.refuse(
            "CP0429", stage.leaf_violation([(leaf.label(operand.id), leaf)], ctx.size), expr.operand.span
        )
    return cast("Stage", stage)


def _well_formed(
    ctx: CheckContext, statement: ast.StageStmt, expr: ast.StageExpr, kind: type[StageOverAxes]
) -> bool:
    """Check that the stage takes the clauses and has one target; False after reporting errors.

    `via` and braces are checked elsewhere.
    """
    before = len(ctx.diagnostics)
    word = kind.NUMBER[1].word if kind.NUMBER else None
    if expr.root is not None and word != "from":
        ctx.error("CP0403", f"`{expr.kind}` takes no `from`", expr.root.span, "only `broadcast` has a root")
    if expr.by is not None and word != "by" and "op" not in kind.__struct_fields__:
        message = f"`{expr.kind}` takes no `by`"
        ctx.error("CP0403", message, expr.by.span, "it combines nothing: `reduce` and `scatter` do")
    if len(statement.targets) > 1:
        message = f"`{expr.kind}` returns one value, found {len(statement.targets)} names for it"
        ctx.error("CP0401", message, ast.span_of(statement.targets[1:]))
    return len(ctx.diagnostics) == before


def _reduction(ctx: CheckContext, scope: PhaseScope, expr: ast.StageExpr) -> WrittenReduction | None:
    """The operator of a `reduce` or `scatter`; None after reporting an error, and for other stages."""
    if expr.kind == "reduce":
        return reduction(ctx, scope, expr.by, expr.span)
    return sum_or_mean(ctx, scope, expr.by, expr.span, "scatter") if expr.kind == "scatter" else None


def _number(
    ctx: CheckContext, expr: ast.StageExpr, kind: type[StageOverAxes], over: Axes | None
) -> dict[str, int] | None:
    """The numeric argument of a stage by field name, empty if it takes none; None after an error."""
    if kind.NUMBER is None:
        return {}
    field, number = kind.NUMBER
    written = expr.root if number.word == "from" else expr.by
    if not isinstance(written, ast.Number):
        where = written.span if written else expr.span
        return ctx.error("CP0402", number.missing[0], where, number.missing[1])
    value = integer(ctx, written, number.role, least=number.least)
    if value is None or over is None or number.rule is None:
        return None if value is None else {field: value}
    return None if ctx.refuse("CP0409", number.rule(value, over, ctx.size), written.span) else {field: value}


def _result_placement(kind: type[StageOverAxes], placement: Placement, over: Axes) -> Placement:
    """The placement of the result."""
    if kind.MAKES == "kept":
        return placement
    whole = placement.without(over)
    return replace(whole, split=(*whole.split, *over)) if kind.MAKES == "split" else whole


def _check_placement(
    ctx: CheckContext,
    scope: PhaseScope,
    statement: ast.StageStmt,
    expr: ast.StageExpr,
    kind: type[StageOverAxes],
    operand: Value,
    by: WrittenReduction | None,
) -> None:
    """Check the type and placement of the operand. Only the first error is reported.

    Raises:
        MistakeError: After reporting an error.
    """
    if expr.kind == "share":
        violation = rules.shareable_operand(expr.operand.text, records=isinstance(operand.type, RecordsType))
        ctx.require("CP0420", violation, expr.operand.span, operand)
        varying = [axis.text for axis in expr.over if operand.placement.varies(axis.text)]
        span = next((axis.span for axis in expr.over if axis.text in varying), expr.span)
        ctx.require("CP0421", rules.same_for_members(expr.operand.text, varying), span, operand)
        return
    check_on_workers(ctx, expr.operand, operand, expr.kind)
    for axis in expr.over:
        actual = status(operand.placement, axis.text)
        if actual not in kind.TAKES:
            _check_not_repeated(ctx, scope, statement, expr, kind, operand)
            _fail_placement(ctx, expr, operand, axis, actual)
        if actual == "partial" and by is not None and by.op.name in ("max", "min"):
            message = (
                f"`{by.op.name}` of terms of a sum means nothing: `{expr.operand.text}` is partial "
                f"over `{axis.text}`"
            )
            note = "`sum` or `mean` adds the terms; `max` and `min` compare values that are `per` rank"
            ctx.fail("CP0317", message, by.span, operand, note)
    if expr.kind == "gather":
        _check_cut_last(ctx, expr, operand)
    elif kind.WHOLE and operand.placement.split:
        cut = operand.placement.split[-1]
        message = f"`{expr.operand.text}` is split over `{cut}`, and `{expr.kind}` takes whole values"
        note = f"`gather {expr.operand.text} over {cut}` first"
        ctx.fail("CP0314", message, expr.operand.span, operand, note)
    elif (kind.WHOLE or kind.MAKES == "split") and is_scalar(operand.type):
        message = f"a scalar cannot be split, found `{expr.operand.text}`"
        remedy = ": `reduce` it" if expr.kind == "scatter" else ""
        note = f"the leading dimension is cut, and a scalar has none{remedy}"
        ctx.fail("CP0311", message, expr.operand.span, operand, note)


def _fail_placement(
    ctx: CheckContext, expr: ast.StageExpr, operand: Value, axis: ast.Name, actual: Status
) -> NoReturn:
    """Report that the stage does not take an operand with this placement along `axis`."""
    name, over = f"`{expr.operand.text}`", f"`{axis.text}`"
    match expr.kind, actual:
        case "slice", _:
            code, takes = "CP0321", "`slice` takes values that are the same over it"
            message = f"{name} is {actual} over {over}, and {takes}"
            remedy = {
                "per": f"`broadcast` or `reduce` it over {over} first",
                "partial": f"`scatter` adds the terms and cuts the sum over {over}",
                "split": "one axis cuts a value once",
            }[actual]
        case _, "same":
            _fail_same(ctx, expr, operand, axis)
        case "gather", _:
            code, takes = "CP0316", "`gather` takes values that are split over it"
            message = f"{name} is {actual} over {over}, and {takes}"
            alternative = ", `broadcast` keeps one" if actual == "per" else ""
            remedy = f"its ranks hold whole values: `reduce` combines them{alternative}"
        case _, "split":
            code = "CP0314"
            message = f"{name} is split over {over}: its ranks hold different parts, not different values"
            remedy = f"`gather {expr.operand.text} over {axis.text}` puts the parts together"
        case _:
            code = "CP0315"
            message = f"{name} is partial over {over}: one term of a sum is no value to {expr.kind}"
            remedy = "use `reduce` to add the terms"
    ctx.fail(code, message, axis.span, operand, remedy)


def _check_not_repeated(
    ctx: CheckContext,
    scope: PhaseScope,
    statement: ast.StageStmt,
    expr: ast.StageExpr,
    kind: type[StageOverAxes],
    operand: Value | None = None,
) -> None:
    """Report a stage whose operand an earlier stage has made the same over one of its axes.

    `operand` is None if the earlier stage has errors.

    Raises:
        MistakeError: After reporting CP0301.
    """
    same_since = scope.same_over(expr.operand, operand)
    for axis in expr.over if "same" not in kind.TAKES else ():
        if axis.text in same_since and (operand is None or status(operand.placement, axis.text) == "same"):
            name, target = expr.operand.text, statement.targets[0].text
            if not same_since.keys() >= {other.text for other in expr.over}:
                note = f"remove `{axis.text}` from the axes"
            elif target != name:
                note = f"remove this `{expr.kind}`, and write `{name}` where `{target}` is used"
            else:
                note = f"remove this `{expr.kind}`"
            where = Note("it became `same` here", same_since[axis.text])
            ctx.fail("CP0301", f"`{name}` is already `same` over `{axis.text}`", axis.span, where, note)


def _fail_same(ctx: CheckContext, expr: ast.StageExpr, operand: Value, axis: ast.Name) -> NoReturn:
    """Report a collective along an axis over which the operand never varied."""
    remedy = (
        f"if each rank has its own, declare it `per {axis.text}`; a term of a sum is `partial {axis.text}`"
    )
    if expr.kind == "gather":
        remedy = f"if it is cut over `{axis.text}`, declare it `split {axis.text}`"
    message = f"`{expr.operand.text}` does not vary over `{axis.text}`, so there is nothing to {expr.kind}"
    ctx.fail("CP0302", message, axis.span, operand, remedy)


def _check_cut_last(ctx: CheckContext, expr: ast.StageExpr, operand: Value) -> None:
    """Check that a `gather` is over the axis over which its operand was split last."""
    split, axis = operand.placement.split, expr.over[0]
    if split[-1] != axis.text:
        message = (
            f"`{expr.operand.text}` was cut over {listed(split)} in this order, "
            f"so `{split[-1]}` is gathered first"
        )
        ctx.fail("CP0313", message, axis.span, operand, "gather in the opposite order: the last cut first")
