"""Checks of `over` and `across`: the axes along which a stage communicates, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.diagnostics import Fix, Note, listed
from commplan.dsl import ast
from commplan.dsl.check.context import Axes, CheckContext
from commplan.dsl.check.placements import resolve_axes
from commplan.dsl.check.scope import PhaseScope
from commplan.ir.plan import AxisKind, Value
from commplan.ir.stages import OVER_AXES
from commplan.ir.types import RecordsType

_ANY = (AxisKind.REPLICA, AxisKind.ENSEMBLE)  # the kinds of axes of workers


def collective_axes(ctx: CheckContext, scope: PhaseScope, expr: ast.StageExpr) -> Axes | None:
    """The axes of a stage with one operand, or None after reporting errors."""
    match expr.kind:
        case "reduce":
            axes = _reduce_axes(ctx, expr)
        case "share":
            axes = resolve_axes(ctx, expr.over, (AxisKind.ENSEMBLE,), "an ensemble to share over")
            message = "`share` says `over`: it combines nothing across members"
            axes = axes if axes and _says_over(ctx, expr.over_word, message) else None
        case _:
            return _worker_axes(ctx, expr)
    return axes if axes and _check_rates(ctx, scope, expr.over) else None


def _reduce_axes(ctx: CheckContext, expr: ast.StageExpr) -> Axes | None:
    """The axes of a `reduce`, or None after reporting errors.

    They are only axes, after `over`, or only ensembles, after `across`.
    """
    axes = resolve_axes(ctx, expr.over, _ANY, "an axis to reduce over")
    if axes is None:
        return None
    ensembles = [axis for axis in axes if ctx.axes[axis].kind is AxisKind.ENSEMBLE]
    word = expr.over_word
    if ensembles and len(ensembles) < len(axes):
        message = (
            f"one `reduce` cannot mix the ensemble {listed(ensembles)} with "
            f"{listed(axis for axis in axes if axis not in ensembles)}"
        )
        note = "write two stages: one `over` the axes, one `across` the ensemble"
        return ctx.error("CP0308", message, word.span.to(expr.over[-1].span), note)
    if ensembles and word.text == "over":
        message = f"this would combine the members of {listed(ensembles)}, which are independent networks"
        note = "gradients of different members are unrelated; if it is intended, write `across`"
        return ctx.error("CP0307", message, word.span, note, fix=Fix("write `across`", word.span, "across"))
    none = f"{listed(axes)} {'is none' if len(axes) == 1 else 'are none'}"
    return axes if ensembles or _says_over(ctx, word, f"`across` is for ensembles, and {none}") else None


def _worker_axes(ctx: CheckContext, expr: ast.StageExpr) -> Axes | None:
    """The axes of any other stage, or None after reporting errors.

    A `broadcast` takes several axes, every other stage one.
    """
    axes = stage_axes(ctx, expr.over, expr.kind)
    message = f"`{expr.kind}` goes `over` axes: `across` is for a `reduce` over ensembles"
    if axes is None or not _says_over(ctx, expr.over_word, message):
        return None
    if len(axes) == 1 or expr.kind == "broadcast":
        return axes
    message = f"`{expr.kind}` takes one axis, found {len(axes)}"
    cuts = "split" in (OVER_AXES[expr.kind].MAKES, *OVER_AXES[expr.kind].TAKES)
    note = f"write one `{expr.kind}` for each axis" + ", in the order in which they cut" * cuts
    return ctx.error("CP0410", message, ast.span_of(expr.over[1:]), note)


def stage_axes(ctx: CheckContext, names: Sequence[ast.Name], stage: str) -> Axes | None:
    """The axes of a stage that may not cross an ensemble, or None after reporting errors.

    `names` are the names after `over`, and `stage` is the verb, for messages.
    """
    axes = resolve_axes(ctx, names, _ANY, f"an axis to {stage} over")
    for name in names if axes is not None else ():
        if ctx.axes[name.text].kind is AxisKind.ENSEMBLE:
            note = "members are independent networks: only `reduce ... across` and `share` cross an ensemble"
            return ctx.error("CP0309", f"`{stage}` cannot cross the ensemble `{name.text}`", name.span, note)
    return axes


def _says_over(ctx: CheckContext, word: ast.Name, message: str) -> bool:
    """Check that the keyword of a stage is `over`; False after reporting `message`."""
    if word.text == "across":
        ctx.error("CP0308", message, word.span, fix=Fix("write `over`", word.span, "over"))
    return word.text != "across"


def _check_rates(ctx: CheckContext, scope: PhaseScope, names: Sequence[ast.Name]) -> bool:
    """Check that members of the ensembles in `names` load at one rate; False after reporting an error."""
    for name in names:
        if name.text in scope.clocks:
            message = f"members of `{name.text}` have their own clocks here and never meet"
            rate = Note("each member loads at its own rate", scope.clocks[name.text])
            note = (
                f"`{scope.title}` may hold no collective over `{name.text}`: they would wait for each other"
            )
            ctx.error("CP0419", message, name.span, rate, note)
            return False
    return True


def check_on_workers(ctx: CheckContext, name: ast.Name, value: Value, stage: str) -> None:
    """Check that an operand is on the workers' devices: not loaded records, and not on servers.

    Args:
        ctx: The state of the check.
        name: The operand in the source.
        value: The operand.
        stage: The verb of the stage, for messages.

    Raises:
        MistakeError: After reporting CP0320 or CP0318.
    """
    if isinstance(value.type, RecordsType):
        message = f"`{stage}` cannot take loaded records, found `{name.text}`"
        note = (
            "records are on the host: `map`, `share` and `output` take them; a fn on the device makes arrays"
        )
        ctx.fail("CP0320", message, name.span, value, note)
    if value.placement.server is not None:
        message = f"`{name.text}` is on `{value.placement.server}`, out of reach of `{stage}`"
        note = "only `exchange` and `elastic` bring servers and workers together"
        ctx.fail("CP0318", message, name.span, value, note)
