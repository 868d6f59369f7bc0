"""The plan language: parses text into a checked plan graph.

`parser` makes the untyped tree (`ast`), and `check` the plan graph. `format` is the formatter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from commplan.diagnostics import Diagnostic

if TYPE_CHECKING:
    from commplan.dsl import ast
    from commplan.ir.plan import Plan, Value


class Analysis(NamedTuple):
    """The result of analyzing a plan text.

    Attributes:
        tree: The untyped tree, with a `BadStmt` for each statement that did not parse.
        plan: The checked plan; None if there are diagnostics.
        values: The values that could be checked.
        diagnostics: All errors, sorted by position.
    """

    tree: ast.File
    plan: Plan | None
    values: tuple[Value, ...]
    diagnostics: tuple[Diagnostic, ...]


def load(text: str, file: str) -> tuple[Plan | None, tuple[Diagnostic, ...]]:
    """Parse and check a plan. Invalid text never raises.

    Args:
        text: The source of the plan.
        file: The file name to show in diagnostics.

    Returns:
        The checked plan, or None if there are errors, and the errors sorted by position.
    """
    analysis = analyze(text, file)
    return analysis.plan, analysis.diagnostics


def analyze(text: str, file: str) -> Analysis:
    """Parse and check a plan, keeping partial results if it has errors. Invalid text never raises.

    The arguments are those of `load`.
    """
    from commplan.dsl.check import check_all  # noqa: PLC0415  (heavy, and `fmt` does without)
    from commplan.dsl.parser import parse  # noqa: PLC0415

    tree, mistakes = parse(text, file)
    plan, values, more = check_all(tree)
    diagnostics = sorted((*mistakes, *more), key=place)
    return Analysis(tree, None if diagnostics else plan, values, tuple(diagnostics))


def place(diagnostic: Diagnostic) -> tuple[int, int, str]:
    """Sort key of a diagnostic: its line, column and code. Those without a location come first."""
    span = diagnostic.span
    return (span.line, span.column, diagnostic.code) if span else (0, 0, diagnostic.code)
