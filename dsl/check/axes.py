"""`over` and `across`: along which axes a stage communicates, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.diagnostics import Fix, Note, Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import Context, described
from commplan.dsl.check.placements import resolve_axes
from commplan.dsl.check.scope import Scope
from commplan.ir.plan import AxisKind, Value
from commplan.ir.types import RecordsType

_ANY = (AxisKind.REPLICA, AxisKind.ENSEMBLE)


def reduce_axes(ctx: Context, scope: Scope, expr: ast.StageExpr) -> tuple[str, ...] | None:
    """The axes of a `reduce`: axes after `over`, ensembles after `across`, never mixed."""
    axes = resolve_axes(ctx, expr.over, _ANY, "an axis to reduce over")
    if axes is None:
        return None
    ensembles = [axis for axis in axes if ctx.axes[axis].kind is AxisKind.ENSEMBLE]
    word = expr.over_word
    if ensembles and len(ensembles) < len(axes):
        ctx.error(
            "CP0308",
            f"one `reduce` cannot mix the ensemble {listed(ensembles)} with "
            f"{listed(axis for axis in axes if axis not in ensembles)}",
            word.span.to(expr.over[-1].span),
            "write two stages: one `over` the axes, one `across` the ensemble",
        )
        return None
    if ensembles and word.text == "over":
        ctx.error(
            "CP0307",
            f"this would combine the members of {listed(ensembles)}, which are networks of their own",
            word.span,
            "gradients of different members have nothing to do with each other; if it is meant, say `across`",
            fix=Fix("write `across`", word.span, "across"),
        )
        return None
    if not ensembles and word.text == "across":
        ctx.error(
            "CP0308",
            f"`across` is for ensembles, and {listed(axes)} {'is none' if len(axes) == 1 else 'are none'}",
            word.span,
            fix=Fix("write `over`", word.span, "over"),
        )
        return None
    return axes if _clocks_allow(ctx, scope, expr.over) else None


def stage_axes(
    ctx: Context, names: Sequence[ast.Name], stage: str, word: ast.Name | None = None
) -> tuple[str, ...] | None:
    """The axes of any other stage that communicates: no ensembles, since nothing crosses them."""
    axes = resolve_axes(ctx, names, _ANY, f"an axis to {stage} over")
    if axes is None:
        return None
    for name in names:
        if ctx.axes[name.text].kind is AxisKind.ENSEMBLE:
            ctx.error(
                "CP0309",
                f"`{stage}` cannot cross the ensemble `{name.text}`",
                name.span,
                "members are networks of their own: only `reduce ... across` and `share` cross an ensemble",
            )
            return None
    if word is not None and word.text == "across":
        ctx.error(
            "CP0308",
            f"`{stage}` goes `over` axes: `across` is for a `reduce` over ensembles",
            word.span,
            fix=Fix("write `over`", word.span, "over"),
        )
        return None
    return axes


def one_axis(ctx: Context, expr: ast.StageExpr) -> str | None:
    """The axis of a stage that takes exactly one."""
    axes = stage_axes(ctx, expr.over, expr.kind, expr.over_word)
    if axes is None:
        return None
    if len(axes) == 1:
        return axes[0]
    ctx.error(
        "CP0410",
        f"`{expr.kind}` takes one axis, found {len(axes)}",
        expr.over[1].span.to(expr.over[-1].span),
        f"write one `{expr.kind}` for each axis, in the order in which they cut",
    )
    return None


def share_axes(ctx: Context, scope: Scope, expr: ast.StageExpr) -> tuple[str, ...] | None:
    """The ensembles of a `share`."""
    axes = resolve_axes(ctx, expr.over, (AxisKind.ENSEMBLE,), "an ensemble to share over")
    if axes is None:
        return None
    if expr.over_word.text == "across":
        ctx.error(
            "CP0308",
            "`share` says `over`: it combines nothing across members",
            expr.over_word.span,
            fix=Fix("write `over`", expr.over_word.span, "over"),
        )
        return None
    return axes if _clocks_allow(ctx, scope, expr.over) else None


def _clocks_allow(ctx: Context, scope: Scope, names: Sequence[ast.Name]) -> bool:
    for name in names:
        if name.text in scope.clocks:
            ctx.error(
                "CP0419",
                f"members of `{name.text}` have their own clocks here and never meet",
                name.span,
                Note("each member loads at its own rate", scope.clocks[name.text]),
                f"`{scope.title}` may hold no collective over `{name.text}`: they would wait for each other",
            )
            return False
    return True


def on_workers(ctx: Context, name: ast.Name, value: Value, stage: str) -> bool:
    """Whether a collective can take the value: it is on the workers' devices, not loaded, not on a server."""
    if isinstance(value.type, RecordsType):
        ctx.error(
            "CP0320",
            f"`{stage}` cannot take loaded records, found `{name.text}`",
            name.span,
            described(value),
            "records are on the host: `map`, `share` and `output` take them; a fn on the device makes arrays",
        )
        return False
    if value.placement.server is not None:
        ctx.error(
            "CP0318",
            f"`{name.text}` lives on `{value.placement.server}`, out of reach of `{stage}`",
            name.span,
            described(value),
            "only `exchange` and `elastic` bring servers and workers together",
        )
        return False
    return True


def axis_span(expr_axes: Sequence[ast.Name], axis: str) -> Span:
    """Where `axis` was named."""
    return next(name.span for name in expr_axes if name.text == axis)
