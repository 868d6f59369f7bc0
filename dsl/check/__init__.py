"""The checker: the untyped tree to the typed plan graph, with every mistake reported once.

One file for each idea: `declarations`, `types`, `placements`; `scope` (the names of a phase) and `phases`,
which asks `stages`, and those ask `clauses`. A name that was declared or bound in error stands for nothing
that can be checked, so that what uses it stays silent.
"""

from __future__ import annotations

from contextlib import suppress

from commplan.diagnostics import Diagnostic
from commplan.dsl import ast
from commplan.dsl.check.context import Context
from commplan.dsl.check.declarations import declare_all
from commplan.dsl.check.phases import check_phases, check_states
from commplan.dsl.statements import GiveUp
from commplan.ir.plan import Phase, Plan, Value


def check(tree: ast.File) -> tuple[Plan | None, tuple[Diagnostic, ...]]:
    """The plan graph of a tree, None if it holds a mistake, and the diagnostics; see `check_all`."""
    plan, _, diagnostics = check_all(tree)
    return plan, diagnostics


def check_all(tree: ast.File) -> tuple[Plan | None, tuple[Value, ...], tuple[Diagnostic, ...]]:
    """Check a tree, whole or recovered.

    Returns the plan graph (None if the tree holds a mistake), the values that could be checked all the same,
    and the diagnostics as they were found. The parser's own diagnostics are not repeated: what it could not
    read is passed over, and names bound there are taken as given.
    """
    ctx = Context(tree.file, tree.text)
    phases: tuple[Phase, ...] = ()
    with suppress(GiveUp):
        declare_all(ctx, tree.items)
        phases = check_phases(ctx, tree.items)
        check_states(ctx, tree.items)
    if tree.name is None or ctx.diagnostics:
        return None, tuple(ctx.values.values()), tuple(ctx.diagnostics)
    inputs, states = (tuple(v.id for v in known.values()) for known in (ctx.inputs, ctx.states))
    axes, sources, fns = tuple(ctx.axes.values()), tuple(ctx.sources.values()), tuple(ctx.fns.values())
    values, name = tuple(ctx.values.values()), tree.name.text
    plan = Plan(name, axes, sources, fns, inputs, states, values, phases, tree.file, ctx.topology)
    return plan, values, ()
