"""The language: text to a checked plan graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from commplan.diagnostics import Diagnostic

if TYPE_CHECKING:
    from commplan.dsl import ast
    from commplan.ir.plan import Plan, Value


class Analysis(NamedTuple):
    """All that is known of a text: its tree, the plan (None where it has errors), the values that could be
    checked, and what is wrong, by place."""

    tree: ast.File
    plan: Plan | None
    values: tuple[Value, ...]
    diagnostics: tuple[Diagnostic, ...]


def load(text: str, file: str) -> tuple[Plan | None, tuple[Diagnostic, ...]]:
    """Parse and check a plan: the plan, or None where it has errors, and all diagnostics by place.

    `file` is the name that diagnostics carry. Never raises on bad text.
    """
    analysis = analyse(text, file)
    return analysis.plan, analysis.diagnostics


def analyse(text: str, file: str) -> Analysis:
    """Parse and check a plan, and keep what is known of it, errors or not. Never raises on bad text."""
    from commplan.dsl.check import check_all  # noqa: PLC0415  (heavy, and `fmt` does without)
    from commplan.dsl.parser import parse  # noqa: PLC0415

    tree, mistakes = parse(text, file)
    plan, values, more = check_all(tree)
    diagnostics = sorted((*mistakes, *more), key=place)
    return Analysis(tree, None if diagnostics else plan, values, tuple(diagnostics))


def place(diagnostic: Diagnostic) -> tuple[int, int, str]:
    """Where a diagnostic stands in its file, to sort by."""
    span = diagnostic.span
    return (span.line, span.column, diagnostic.code) if span else (0, 0, diagnostic.code)
