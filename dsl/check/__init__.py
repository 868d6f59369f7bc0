"""The checker: from the untyped tree to the typed plan graph, reporting each mistake once.

There is one module per concept: `declarations`, `types`, `placements`, and `scope` for the names of a phase.
`stages.phases` calls the checks of `stages`, which call those of `clauses`. A name whose declaration or
binding is wrong has no value. Uses of it are not checked, so that one mistake makes one error.
"""

from __future__ import annotations

from contextlib import suppress

from commplan.diagnostics import Diagnostic
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext
from commplan.dsl.check.declarations import declare_all
from commplan.dsl.check.stages.phases import check_phases, check_states
from commplan.dsl.statements import GiveUp
from commplan.ir.plan import Phase, Plan, Value


def check(tree: ast.File) -> tuple[Plan | None, tuple[Diagnostic, ...]]:
    """Check a tree, and return its plan graph and the diagnostics, as `check_all` does."""
    plan, _, diagnostics = check_all(tree)
    return plan, diagnostics


def check_all(tree: ast.File) -> tuple[Plan | None, tuple[Value, ...], tuple[Diagnostic, ...]]:
    """Check a tree, complete or recovered from syntax errors.

    Parse errors are not reported again. Statements that did not parse are skipped, and the names that they
    would bind are assumed to be bound.

    Returns:
        The plan graph, the values that could be checked, and the diagnostics in the order of detection. The
        plan graph is None if there are diagnostics, or the tree has no name.
    """
    ctx = CheckContext(tree.file, tree.text)
    phases: tuple[Phase, ...] = ()
    with suppress(GiveUp):
        declare_all(ctx, tree.items)
        phases = check_phases(ctx, tree.items)
        check_states(ctx, tree.items)
    if tree.name is None or ctx.diagnostics:
        return None, tuple(ctx.values.values()), tuple(ctx.diagnostics)
    inputs, states = (tuple(v.id for v in named.values()) for named in (ctx.inputs, ctx.states))
    axes, sources, fns = tuple(ctx.axes.values()), tuple(ctx.sources.values()), tuple(ctx.fns.values())
    values, name = tuple(ctx.values.values()), tree.name.text
    plan = Plan(name, axes, sources, fns, inputs, states, values, phases, tree.file, ctx.topology)
    return plan, values, ()
