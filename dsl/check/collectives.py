"""broadcast, share, reduce, scatter, slice, gather: what each makes of a placement."""

from __future__ import annotations

from commplan.diagnostics import Note, listed
from commplan.dsl import ast
from commplan.dsl.check.axes import axis_span, on_workers, one_axis, reduce_axes, share_axes, stage_axes
from commplan.dsl.check.context import Context, described, is_scalar
from commplan.dsl.check.numbers import integer
from commplan.dsl.check.ops import operand_suits, reduction
from commplan.dsl.check.options import hints
from commplan.dsl.check.placements import status
from commplan.dsl.check.scope import Scope
from commplan.dsl.check.via import algorithm, carrying, check_accumulation
from commplan.ir.plan import Broadcast, Gather, Reduce, Scatter, Share, Slice, Stage, Value
from commplan.ir.stages import rules
from commplan.ir.types import Placement, RecordsType


def check_collective(
    ctx: Context, scope: Scope, statement: ast.StageStmt, expr: ast.StageExpr
) -> Stage | None:
    """One of the six stages that take one operand over some axes."""
    foreign = _foreign_clauses(ctx, expr)
    given = len(statement.targets)
    if given > 1:
        ctx.error(
            "CP0401",
            f"`{expr.kind}` gives one value, found {given} names for it",
            statement.targets[1].span.to(statement.targets[-1].span),
        )
        foreign = True
    checks = {
        "broadcast": check_broadcast,
        "share": check_share,
        "reduce": check_reduce,
        "scatter": check_scatter,
        "slice": check_slice,
        "gather": check_gather,
    }
    stage = checks[expr.kind](ctx, scope, statement.targets[0], expr, statement)
    return None if foreign else stage


def _foreign_clauses(ctx: Context, expr: ast.StageExpr) -> bool:
    """Report clauses that the stage does not take; `via` and braces have their own reports."""
    found = False
    if expr.root is not None and expr.kind != "broadcast":
        ctx.error("CP0403", f"`{expr.kind}` takes no `from`", expr.root.span, "only `broadcast` has a root")
        found = True
    if expr.by is not None and expr.kind not in ("reduce", "scatter"):
        ctx.error(
            "CP0403",
            f"`{expr.kind}` takes no `by`",
            expr.by.span,
            "it combines nothing: `reduce` and `scatter` do",
        )
        found = True
    return found


def check_broadcast(
    ctx: Context, scope: Scope, target: ast.Name, expr: ast.StageExpr, statement: ast.StageStmt
) -> Broadcast | None:
    """`y = broadcast x over AXES from ROOT`: per -> same."""
    operand = scope.operand(expr.operand)
    over = stage_axes(ctx, expr.over, "broadcast", expr.over_word)
    via = algorithm(ctx, expr.via, "broadcast", over)
    found = hints(ctx, expr.options, "broadcast", operand.type if operand else None)
    root = _root(ctx, expr, over)
    if operand is None or over is None or root is None:
        return None
    if not on_workers(ctx, expr.operand, operand, "broadcast"):
        return None
    for axis in over:
        if not _broadcasts(ctx, scope, expr, operand, axis):
            return None
    result = scope.bind(target, operand.type, operand.placement.same_over(over))
    scope.mark_same(result, operand.id, over, target.span)
    return Broadcast(result, operand.id, over, root, statement.span, via, found)


def _root(ctx: Context, expr: ast.StageExpr, over: tuple[str, ...] | None) -> int | None:
    if expr.root is None:
        ctx.error(
            "CP0402", "the broadcast has no root", expr.span, "add `from 0`: the rank whose value is kept"
        )
        return None
    root = integer(ctx, expr.root, "a root", least=0)
    if root is None or over is None:
        return root
    return None if ctx.refuse("CP0409", rules.root(root, over, ctx.size), expr.root.span) else root


def _broadcasts(ctx: Context, scope: Scope, expr: ast.StageExpr, operand: Value, axis: str) -> bool:
    match status(operand.placement, axis):
        case "per":
            return True
        case "same":
            return _report_same(ctx, scope, expr, operand, axis)
        case "partial":
            ctx.error(
                "CP0315",
                f"`{expr.operand.text}` is partial over `{axis}`: one term of a sum is no value to broadcast",
                axis_span(expr.over, axis),
                described(operand),
                "use `reduce` to add the terms",
            )
        case "split":
            _report_split(ctx, expr, operand, axis)
    return False


def _report_same(ctx: Context, scope: Scope, expr: ast.StageExpr, operand: Value, axis: str) -> bool:
    """A collective along an axis on which nothing varies: reduced before, or never different."""
    span = axis_span(expr.over, axis)
    made = scope.made_same.get(operand.id, {}).get(axis)
    if made is not None:
        ctx.error(
            "CP0301",
            f"`{expr.operand.text}` is already the same over `{axis}`",
            span,
            Note("it was made so here", made),
            f"leave this `{expr.kind}` out",
        )
    else:
        remedy = f"if each rank has its own, declare it `per {axis}`; a term of a sum is `partial {axis}`"
        if expr.kind == "gather":
            remedy = f"if it is cut over `{axis}`, declare it `split {axis}`"
        ctx.error(
            "CP0302",
            f"`{expr.operand.text}` does not vary over `{axis}`, so there is nothing to {expr.kind}",
            span,
            described(operand),
            remedy,
        )
    return False


def _report_split(ctx: Context, expr: ast.StageExpr, operand: Value, axis: str) -> bool:
    ctx.error(
        "CP0314",
        f"`{expr.operand.text}` is split over `{axis}`: its ranks hold different parts, not different values",
        axis_span(expr.over, axis),
        described(operand),
        f"`gather {expr.operand.text} over {axis}` puts the parts together",
    )
    return False


def check_share(
    ctx: Context, scope: Scope, target: ast.Name, expr: ast.StageExpr, statement: ast.StageStmt
) -> Share | None:
    """`y = share x over MEMBER via DESIGN`: same -> same, a loaded value."""
    operand = scope.operand(expr.operand)
    over = share_axes(ctx, scope, expr)
    via = algorithm(ctx, expr.via, "share", over)
    found = hints(ctx, expr.options, "share")
    if expr.via is None:
        ctx.error(
            "CP0402", "the share does not say how", expr.span,
            f"add `via` with {listed(carrying('share'), 'or')}",
            "without a `share` the compiler chooses",
        )  # fmt: skip
    if operand is None or over is None:
        return None
    broken = rules.loaded(expr.operand.text, records=isinstance(operand.type, RecordsType))
    if ctx.refuse("CP0420", broken, expr.operand.span, described(operand)):
        return None
    varying = [axis for axis in over if operand.placement.varies(axis)]
    span = axis_span(expr.over, varying[0]) if varying else expr.span
    if ctx.refuse("CP0421", rules.alike(expr.operand.text, varying), span, described(operand)):
        return None
    result = scope.bind(target, operand.type, operand.placement)
    # Without a sound `via` there is an error: the design does not matter then.
    return Share(result, operand.id, over, via, statement.span, found) if via else None


def check_reduce(
    ctx: Context, scope: Scope, target: ast.Name, expr: ast.StageExpr, statement: ast.StageStmt
) -> Reduce | None:
    """`y = reduce x over AXES by OP`: partial or per -> same."""
    operand = scope.operand(expr.operand)
    over = reduce_axes(ctx, scope, expr)
    by = reduction(ctx, scope, expr.by, expr.span)
    via = algorithm(ctx, expr.via, "reduce", over)
    found = hints(ctx, expr.options, "reduce", operand.type if operand else None)
    check_accumulation(ctx, expr.via, by and by.op.name, via, found, operand)
    if operand is None or over is None:
        return None
    if not on_workers(ctx, expr.operand, operand, "reduce"):
        return None
    extreme = by is not None and by.op.name in ("max", "min")
    for axis in over:
        match status(operand.placement, axis):
            case "same":
                _report_same(ctx, scope, expr, operand, axis)
                return None
            case "split":
                _report_split(ctx, expr, operand, axis)
                return None
            case "partial" if extreme and by is not None:
                ctx.error(
                    "CP0317",
                    f"`{by.op.name}` of terms of a sum means nothing: `{expr.operand.text}` is partial "
                    f"over `{axis}`",
                    by.span,
                    described(operand),
                    "`sum` or `mean` adds the terms; `max` and `min` compare values that are `per` rank",
                )
                return None
            case _:
                pass
    if by is None or not operand_suits(ctx, by, operand):
        return None
    result = scope.bind(target, operand.type, operand.placement.same_over(over))
    scope.mark_same(result, operand.id, over, target.span)
    across = expr.over_word.text == "across"
    return Reduce(result, operand.id, over, by.op, statement.span, across, via, found)


def check_scatter(
    ctx: Context, scope: Scope, target: ast.Name, expr: ast.StageExpr, statement: ast.StageStmt
) -> Scatter | None:
    """`y = scatter x over AXIS by OP`: partial -> split."""
    operand = scope.operand(expr.operand)
    axis = one_axis(ctx, expr)
    by = reduction(ctx, scope, expr.by, expr.span)
    via = algorithm(ctx, expr.via, "scatter", (axis,) if axis else None)
    found = hints(ctx, expr.options, "scatter", operand.type if operand else None)
    check_accumulation(ctx, expr.via, by and by.op.name, via, found, operand)
    if by is not None and by.op.name in ("max", "min"):
        ctx.error(
            "CP0317",
            f"`scatter` adds terms of a sum, and `{by.op.name}` does not",
            by.span,
            "use `sum` or `mean`",
        )
        by = None
    if operand is None or axis is None or not on_workers(ctx, expr.operand, operand, "scatter"):
        return None
    match status(operand.placement, axis):
        case "same":
            _report_same(ctx, scope, expr, operand, axis)
            return None
        case "split":
            _report_split(ctx, expr, operand, axis)
            return None
        case "per":
            ctx.error(
                "CP0316",
                f"`{expr.operand.text}` is per `{axis}`, and `scatter` takes terms of a sum",
                axis_span(expr.over, axis),
                described(operand),
                f"declare it `partial {axis}` if it is a term; `reduce` takes values that are `per` rank",
            )
            return None
        case "partial":
            pass
    if not _can_be_cut(ctx, expr, operand):
        return None
    if by is None or not operand_suits(ctx, by, operand):
        return None
    placement = operand.placement.same_over((axis,))
    result = scope.bind(target, operand.type, _cut(placement, axis))
    return Scatter(result, operand.id, (axis,), by.op, statement.span, via, found)


def check_slice(
    ctx: Context, scope: Scope, target: ast.Name, expr: ast.StageExpr, statement: ast.StageStmt
) -> Slice | None:
    """`y = slice x over AXIS`: same -> split."""
    operand = scope.operand(expr.operand)
    axis = one_axis(ctx, expr)
    algorithm(ctx, expr.via, "slice", (axis,) if axis else None)
    hints(ctx, expr.options, "slice")
    if operand is None or axis is None or not on_workers(ctx, expr.operand, operand, "slice"):
        return None
    found = status(operand.placement, axis)
    if found != "same":
        remedy = {
            "per": f"`broadcast` or `reduce` it over `{axis}` first",
            "partial": f"`scatter` adds the terms and cuts the sum over `{axis}`",
            "split": "one axis cuts a value once",
        }[found]
        ctx.error(
            "CP0321",
            f"`{expr.operand.text}` is {found} over `{axis}`, and `slice` takes what is the same over it",
            axis_span(expr.over, axis),
            described(operand),
            remedy,
        )
        return None
    if not _can_be_cut(ctx, expr, operand):
        return None
    result = scope.bind(target, operand.type, _cut(operand.placement, axis))
    return Slice(result, operand.id, (axis,), statement.span)


def check_gather(
    ctx: Context, scope: Scope, target: ast.Name, expr: ast.StageExpr, statement: ast.StageStmt
) -> Gather | None:
    """`y = gather x over AXIS`: split -> same, the last cut first."""
    operand = scope.operand(expr.operand)
    axis = one_axis(ctx, expr)
    via = algorithm(ctx, expr.via, "gather", (axis,) if axis else None)
    found = hints(ctx, expr.options, "gather", operand.type if operand else None)
    if operand is None or axis is None or not on_workers(ctx, expr.operand, operand, "gather"):
        return None
    placement = operand.placement
    how = status(placement, axis)
    if how == "same":
        _report_same(ctx, scope, expr, operand, axis)
        return None
    if how != "split":
        ctx.error(
            "CP0316",
            f"`{expr.operand.text}` is {how} over `{axis}`, and `gather` takes what is split over it",
            axis_span(expr.over, axis),
            described(operand),
            "its ranks hold whole values: `reduce` combines them"
            + (", `broadcast` keeps one" * (how == "per")),
        )
        return None
    if placement.split[-1] != axis:
        ctx.error(
            "CP0313",
            f"`{expr.operand.text}` was cut over {listed(placement.split)} in this order, "
            f"so `{placement.split[-1]}` is gathered first",
            axis_span(expr.over, axis),
            described(operand),
            "gather in the opposite order: the last cut first",
        )
        return None
    whole = Placement(placement.per, placement.partial, placement.split[:-1])
    result = scope.bind(target, operand.type, whole)
    scope.mark_same(result, operand.id, (axis,), target.span)
    return Gather(result, operand.id, (axis,), statement.span, via, found)


def _cut(placement: Placement, axis: str) -> Placement:
    return Placement(placement.per, placement.partial, (*placement.split, axis))


def _can_be_cut(ctx: Context, expr: ast.StageExpr, operand: Value) -> bool:
    if not is_scalar(operand.type):
        return True
    ctx.error(
        "CP0311",
        f"a scalar cannot be split, found `{expr.operand.text}`",
        expr.operand.span,
        described(operand),
        "the leading dimension is cut, and a scalar has none" + (": `reduce` it" * (expr.kind == "scatter")),
    )
    return False
