"""Checks of `load`: batches of records, their distribution over ranks, and their count."""

from __future__ import annotations

from typing import get_args

from commplan.diagnostics import Fix, listed
from commplan.dsl import ast
from commplan.dsl.check.clauses.options import hints
from commplan.dsl.check.context import Axes, CheckContext, all_known
from commplan.dsl.check.numbers import integer
from commplan.dsl.check.placements import resolve_axes
from commplan.dsl.check.scope import PhaseScope
from commplan.ir.plan import AxisKind, Load
from commplan.ir.stages import rules
from commplan.ir.types import ArrayType, DType, Placement, RecordsType, Tail, Visit

VISITS: tuple[Visit, ...] = get_args(Visit)  # the words after `visit`
TAILS: tuple[Tail, ...] = get_args(Tail)  # the words after `tail`


def check_load(
    ctx: CheckContext, scope: PhaseScope, statement: ast.StageStmt, expr: ast.LoadExpr
) -> Load | None:
    """Check a load, and bind its records and, if requested, their count.

        x [, n] = load SOURCE batch N [split AXES] [per MEMBER] visit KIND seed N [tail KIND]

    Returns:
        The stage, or None after reporting errors.

    Raises:
        MistakeError: After reporting more than two targets.
    """
    # Check all clauses before the first return, to report all errors in one run.
    options = hints(ctx, expr.options, "load")
    how = "declare one: `source NAME : TYPE`"
    source = ctx.look_up(expr.source, ctx.sources, "CP0105", "source", how)
    split = _split(ctx, expr)
    per = resolve_axes(ctx, expr.per, (AxisKind.ENSEMBLE,), "an ensemble")
    clock = _clock(ctx, expr.batch)
    batch = _batch(ctx, expr, split)
    if clock:
        _refuse_ahead(ctx, expr.options)
    visit = _visit(ctx, expr)
    tail = _tail(ctx, expr, visit, split)
    seed = None
    if expr.seed is not None:
        seed = integer(ctx, expr.seed, "a seed", least=0)
    elif expr.visit is not None:
        note = "add `seed N`: the order of records follows from it"
        ctx.error("CP0402", "the load has no seed", expr.span, note)
    target_count = len(statement.targets)
    if target_count > 2:
        message = f"`load` returns records and, if wanted, their count, found {target_count} names"
        ctx.fail("CP0401", message, statement.targets[2].span, "write `x = load ...` or `x, n = load ...`")
    if source is None or split is None or per is None or clock is None or batch is None:
        return None
    if visit is None or tail is None or seed is None:
        return None
    targets = statement.targets
    placement = Placement(ctx.ordered((*per, *clock)), (), split)
    result = scope.bind(targets[0], RecordsType(batch, source.type), placement)
    count = None
    if target_count == 2:
        everywhere = Placement(ctx.ordered((*placement.per, *split)))
        count = scope.bind(targets[1], ArrayType(DType.I32), everywhere)
    member = clock[0] if clock else None
    return Load(
        result, source.name, batch, visit, seed, statement.span, count, member, split, ctx.ordered(per),
        tail, options,
    )  # fmt: skip


def _split(ctx: CheckContext, expr: ast.LoadExpr) -> Axes | None:
    """The axes over which records are split, or None after reporting an error.

    Without `split`, the only axis of the plan, or none if the plan has none.
    """
    if expr.split:
        return resolve_axes(ctx, expr.split, (AxisKind.REPLICA,), "an axis to split over")
    axes = tuple(axis.name for axis in ctx.axes.values() if axis.kind is AxisKind.REPLICA)
    if len(axes) <= 1:
        return axes
    message = f"the load does not say over which of {listed(axes)} its records are split"
    note = f"add `split {', '.join(axes)}`, major first, or a part of it"
    return ctx.error("CP0416", message, expr.span, note)


def _clock(ctx: CheckContext, batch: ast.BatchClause) -> Axes | None:
    """The ensemble of `batch [..] over MEMBER` as a tuple; empty if all members share one rate.

    None after reporting an error.
    """
    if batch.over is None:
        if len(batch.sizes) == 1:
            return ()
        message = "several batch sizes, but no ensemble whose members they belong to"
        note = "write `batch [32, 64] over MEMBER`, one size per member, or one size for all"
        return ctx.error("CP0417", message, batch.span, note)
    members = resolve_axes(ctx, (batch.over,), (AxisKind.ENSEMBLE,), "an ensemble")
    if members is None:
        return None
    declared = ctx.axes[members[0]]
    violation = rules.member_batches(batch.sizes, members[0], ctx.size)
    return None if ctx.refuse("CP0417", violation, batch.span, declared) else members


def _refuse_ahead(ctx: CheckContext, options: ast.Options | None) -> None:
    """Report `device_prefetch` of a load whose members have their own rates.

    The number of batches that each member has consumed bounds the lead of one member over another. Batches
    that wait on the device are not consumed, and would hold back the other members.
    """
    for option in options.items if options else ():
        if option.key.text == "device_prefetch":
            message = "`device_prefetch` is not an option of a `load` whose members have independent clocks"
            note = "unused batches of one member would hold back the others"
            ctx.error(
                "CP0610", message, option.key.span, note, "leave it out, or give all members one batch size"
            )


def _batch(ctx: CheckContext, expr: ast.LoadExpr, split: Axes | None) -> tuple[int, ...] | None:
    """The batch sizes, one or one per member, or None after reporting errors."""
    sizes = all_known([integer(ctx, number, "a batch size") for number in expr.batch.sizes])
    if sizes is None:
        return None
    violation = rules.even_batch(sizes, split or (), ctx.size)
    span = expr.batch.sizes[violation.at].span if violation else expr.batch.span
    return None if ctx.refuse("CP0415", violation, span) else sizes


def _visit(ctx: CheckContext, expr: ast.LoadExpr) -> Visit | None:
    """The word after `visit`, or None after reporting an error."""
    if expr.visit is None:
        message = "the load does not say how often a record is visited" + ", nor its seed" * (not expr.seed)
        return ctx.error("CP0402", message, expr.span, f"add `visit {'|'.join(VISITS)} seed N`")
    message = f"a visit is {listed(VISITS, 'or')}, found `{expr.visit.text}`"
    return ctx.choose(expr.visit, VISITS, "CP0411", message)


def _tail(ctx: CheckContext, expr: ast.LoadExpr, visit: Visit | None, split: Axes | None) -> Tail | None:
    """The word after `tail`, `pad` without the clause, or None after reporting an unknown word.

    A word that does not fit the visit or the split is reported and returned.
    """
    if expr.tail is None:
        return "pad"
    message = f"a tail is {listed(TAILS, 'or')}, found `{expr.tail.text}`"
    tail = ctx.choose(expr.tail, TAILS, "CP0412", message)
    if tail is None:
        return None
    pad, span = Fix("write `pad`", expr.tail.span, "pad"), expr.tail.span
    if visit is None or not ctx.refuse("CP0413", rules.dropped_tail(visit, tail), span, fix=pad):
        split = split or ()
        note = None if expr.split or not split else f"a load is split over the only axis, `{split[0]}`"
        ctx.refuse("CP0414", rules.short_tail(tail, split), span, note and f"{note}, by itself", fix=pad)
    return tail
