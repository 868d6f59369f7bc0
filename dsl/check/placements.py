"""Checks of placements and lists of axes in the source, and the placement of a value along one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commplan.diagnostics import Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import KIND_WORDS, Axes, CheckContext, is_scalar
from commplan.ir.plan import AxisKind
from commplan.ir.types import Placement, Status, Type


def status(placement: Placement, axis: str) -> Status:
    """The placement of a value along one axis."""
    if axis in placement.per:
        return "per"
    if axis in placement.partial:
        return "partial"
    return "split" if axis in placement.split else "same"


def resolve_axes(
    ctx: CheckContext, names: Sequence[ast.Name], kinds: Iterable[AxisKind], role: str
) -> Axes | None:
    """The named axes in source order, or None after reporting errors.

    Args:
        ctx: The state of the check.
        names: The names in the source.
        kinds: The kinds of axes that are valid here.
        role: The expected axis in words with an article, such as "an axis to split over".
    """
    allowed = tuple(kinds)
    valid = True
    names_before: set[str] = set()
    for name in names:
        if name.text in ctx.unknown:
            valid = False
            continue
        if name.text not in ctx.axes:
            valid = False
            _not_an_axis(ctx, name, allowed, role)
            continue
        axis = ctx.axes[name.text]
        if axis.kind not in allowed:
            valid = False
            ctx.error("CP0113", f"`{name.text}` is {KIND_WORDS[axis.kind]}, expected {role}", name.span, axis)
        elif name.text in names_before:
            valid = False
            ctx.error("CP0109", f"`{name.text}` is named twice", name.span)
        names_before.add(name.text)
    return tuple(name.text for name in names) if valid else None


def _not_an_axis(ctx: CheckContext, name: ast.Name, kinds: Sequence[AxisKind], role: str) -> None:
    """Report a name that is not an axis. The arguments are those of `resolve_axes`."""
    kind = ctx.kind_of(name.text)
    if kind is not None:
        ctx.error("CP0104", f"`{name.text}` is {kind}, expected {role}", name.span)
        return
    if ctx.note_unknown(name.text):
        return
    words = [KIND_WORDS[kind] for kind in kinds]
    candidates = [axis.name for axis in ctx.axes.values() if axis.kind in kinds]
    candidates += [
        other for other, (kind, _) in ctx.declared.items() if other in ctx.unknown and kind in words
    ]
    message = f"there is no axis `{name.text}`, expected {role}"
    word = KIND_WORDS[kinds[0]].split()[-1]
    note = f"the plan declares none: add a line such as `{word} {name.text} = 8`"
    if candidates:
        note = f"declared: {listed(candidates)}"
    ctx.error("CP0104", message, name.span, note, fix=ctx.rename(name, candidates))


def declared_placement(
    ctx: CheckContext, items: Sequence[ast.PlacementItem], type_: Type | None, span: Span
) -> Placement | None:
    """The declared placement of an input or state, or None after reporting errors.

    Args:
        ctx: The state of the check.
        items: The clauses; empty for a value that is the same everywhere.
        type_: The type of the value; None if it is wrong.
        span: The location of the type.
    """
    placed: dict[str, Status] = {}
    valid = True
    for item in items:
        axes = resolve_axes(ctx, item.axes, (AxisKind.REPLICA, AxisKind.ENSEMBLE), "an axis or an ensemble")
        if axes is None:
            valid = False
            continue
        for name, axis in zip(item.axes, axes, strict=True):
            if axis in placed:
                valid = False
                message = f"`{axis}` has two placements, `{placed[axis]}` and `{item.kind}`"
                note = "along one axis a value is same, per, partial or split"
                ctx.error("CP0310", message, name.span, note)
            elif item.kind in ("partial", "split") and ctx.axes[axis].kind is AxisKind.ENSEMBLE:
                valid = False
                message = f"a value cannot be {item.kind} over the ensemble `{axis}`"
                note = "a value is the same for all of them, or `per` member"
                ctx.error("CP0312", message, name.span, f"members are independent networks: {note}")
            placed[axis] = item.kind
    bare = next((item for item in items if item.kind == "same" and not item.axes), None)
    if bare is not None and len(items) > 1:
        note = "`same` is the default of every axis that is not named: leave it out"
        ctx.error("CP0310", "`same` is combined with another placement", bare.span, note)
        valid = False
    if not valid:
        return None
    per, partial, split = (
        [axis for axis in placed if placed[axis] == kind] for kind in ("per", "partial", "split")
    )
    if split and type_ is not None and is_scalar(type_):
        message = f"a scalar cannot be split, found `{type_}`"
        return ctx.error("CP0311", message, span, "`split` cuts the leading dimension, and a scalar has none")
    return Placement(ctx.ordered(per), ctx.ordered(partial), tuple(split))
