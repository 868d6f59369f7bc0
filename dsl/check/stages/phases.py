"""Checks of phases: unique headers, their statements in order, and the states that they set and update."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from commplan.diagnostics import Note, Span
from commplan.dsl import ast
from commplan.dsl.check.clauses.options import check_effects
from commplan.dsl.check.context import CheckContext, MistakeError
from commplan.dsl.check.fragments import check_divisible
from commplan.dsl.check.numbers import integer
from commplan.dsl.check.scope import PhaseScope
from commplan.dsl.check.stages.collectives import check_collective
from commplan.dsl.check.stages.loads import check_load
from commplan.dsl.check.stages.maps import check_map
from commplan.dsl.check.stages.servers import check_elastic, check_exchange
from commplan.ir.plan import Phase, Stage

# Methods of a bound plan: a phase with such a name could not be called.
BOUND_PLAN_METHODS = (
    "init", "start", "step", "every", "spmd", "varying", "tap", "layer", "layers", "scan_layers", "shards",
    "batches", "member",
)  # fmt: skip
# All attributes of a bound plan, which cannot be names of phases.
RESERVED_PHASES = frozenset(
    (*BOUND_PLAN_METHODS, "program", "mesh", "sources", "functions", "seed", "context", "phases")
)

# The check of each kind of stage. It returns the stage, or None after reporting errors.
CHECKS: dict[type[ast.Expr], Callable[..., Stage | None]] = {
    ast.LoadExpr: check_load,
    ast.MapExpr: check_map,
    ast.StageExpr: check_collective,
    ast.ExchangeExpr: check_exchange,
    ast.ElasticExpr: check_elastic,
}


def check_phases(ctx: CheckContext, items: tuple[ast.Decl, ...]) -> tuple[Phase, ...]:
    """Check all phases, and return them in the order of the file.

    The body of a phase with a wrong header is checked too.
    """
    headers: dict[str, Span] = {}
    phases: list[Phase] = []
    for item in items:
        if not isinstance(item, ast.PhaseDecl):
            continue
        title, name = _header(ctx, item)
        if name in headers:
            ctx.error("CP0501", f"`{title}` is written twice", item.header, Note("first here", headers[name]),
                "a phase has one body: put the statements together",
            )  # fmt: skip
        headers.setdefault(name, item.header)
        phases.append(_phase(ctx, item, title, name))
    _check_hidden_states(ctx, phases)
    return tuple(phases)


def _check_hidden_states(ctx: CheckContext, phases: Sequence[Phase]) -> None:
    """Report states that a hidden phase and another one update: one update would overwrite the other."""
    for hidden in (phase for phase in phases if phase.hidden):
        states = {binding.name for binding in hidden.updates}
        for phase in (each for each in phases if each is not hidden and each.kind != "start"):
            for binding in (each for each in phase.updates if each.name in states):
                message = f"`{binding.name}` is updated by a hidden phase, and by another phase"
                note = Note(
                    "this phase reads states at its beginning and updates them at its end", hidden.span
                )
                ctx.error("CP0518", message, phase.span, note)


def _header(ctx: CheckContext, decl: ast.PhaseDecl) -> tuple[str, str]:
    """The header in words, and the name of the phase in the plan graph. Reports errors in it."""
    match decl.kind:
        case "start":
            return "at start", "start"
        case "step":
            return "each step", "step"
        case "every":
            period = decl.period
            assert period is not None
            integer(ctx, period, "a period")
            return f"every {period.text} steps", f"every_{period.value}"
        case "named":
            name = decl.name
            assert name is not None
            if name.text in RESERVED_PHASES or re.fullmatch(r"every_\d+", name.text):
                note = (
                    "a phase is called by its name on the bound plan, which has something else of that name"
                )
                ctx.error("CP0510", f"a phase cannot be called `{name.text}`", name.span, note)
            return f"phase {name.text}", name.text


def _phase(ctx: CheckContext, decl: ast.PhaseDecl, title: str, name: str) -> Phase:
    """Check the body of a phase. Stages with errors are missing from the result."""
    before = len(ctx.diagnostics)
    scope = PhaseScope(ctx, decl, title)
    for statement in decl.body:
        match statement:
            case ast.BadStmt():
                scope.bind_unparsed(statement)
            case ast.OutputStmt():
                scope.output(statement)
            case ast.StageStmt():
                _statement(ctx, scope, statement, decl.kind)
    updates = scope.updates()
    period = decl.period.value if decl.period is not None and isinstance(decl.period.value, int) else 1
    fragments, _, hidden = scope.fragments.division if scope.fragments is not None else (1, (), 0)
    if scope.fragments is not None and len(ctx.diagnostics) == before:
        scope.fragments.check_exchange((*scope.outputs, *updates), decl.header)
    stages, outputs = tuple(scope.stages), tuple(scope.outputs)
    return Phase(name, decl.kind, decl.header, period, stages, outputs, updates, fragments, hidden)


def _statement(ctx: CheckContext, scope: PhaseScope, statement: ast.StageStmt, kind: str) -> None:
    """Check a stage of a phase of `kind`. If it has errors, its names are bound to BAD."""
    before = len(ctx.diagnostics)
    scope.check_targets(statement.targets)
    valid = len(ctx.diagnostics) == before
    stage = None
    with suppress(MistakeError):
        if scope.fragments is not None:
            check_divisible(ctx, statement.expr, scope.fragments.division)
            scope.fragments.prepare(statement.expr, scope.env)
        stage = CHECKS[type(statement.expr)](ctx, scope, statement, statement.expr)
    if stage is not None:
        scope.stages.append(stage)
        if scope.fragments is not None:
            scope.fragments.add(stage, statement.span)
        check_effects(ctx, statement.expr.options, stage, kind)
    if stage is None or not valid:
        scope.bind_bad((name.text for name in statement.targets), statement.span)
        scope.bind_bad(_states_of(ctx, statement.expr), statement.span)


def _states_of(ctx: CheckContext, expr: ast.Expr) -> tuple[str, ...]:
    """The states that a stage updates, independent of the names of its targets."""
    match expr:
        case ast.ExchangeExpr():
            names = expr.states
        case ast.ElasticExpr():
            names = (expr.center,)
        case _:
            names = ()
    return tuple(name.text for name in names if name.text in ctx.states)


def check_states(ctx: CheckContext, items: tuple[ast.Decl, ...]) -> None:
    """Report states that are not set in `at start`, or not updated by another phase.

    Nothing is reported if some declaration or phase does not parse, nor for states that were reported for
    another reason.
    """
    if any(isinstance(item, ast.BadStmt) for item in items):
        return  # the phase that does not parse may set or update them
    for state in ctx.states.values():
        name = state.name
        if name in ctx.misspelt_states:
            continue
        never_set = name not in ctx.set_states
        never_updated = name not in ctx.updated_states
        if name in ctx.unset_states:
            never_set = False  # the read was reported
        if not never_set and not never_updated:
            continue
        near = ctx.near(name, (other for other in ctx.bound if other not in ctx.declared))
        misspelled = (
            Note(f"`{near}` is bound here: was `{name}` meant?", ctx.bound[near][1]) if near else None
        )
        if never_set:
            code, never = "CP0502", "set" + " and never updated" * never_updated
            remedy = f"bind `{name}` in `at start {{ }}`: that is its value before the first step"
        else:
            code, never = "CP0503", "updated"
            remedy = (
                f"bind `{name}` in a phase other than `at start`; a value that never changes needs no state"
            )
        ctx.error(code, f"the state `{name}` is never {never}", state.span, remedy, misspelled)
