"""The language: text to a checked plan graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commplan.diagnostics import Diagnostic

if TYPE_CHECKING:
    from commplan.ir.plan import Plan


def load(text: str, file: str) -> tuple[Plan | None, tuple[Diagnostic, ...]]:
    """Parse and check a plan: the plan, or None where it has errors, and all diagnostics by place.

    `file` is the name that diagnostics carry. Never raises on bad text.
    """
    from commplan.dsl.check import check  # noqa: PLC0415  (heavy, and `fmt` does without)
    from commplan.dsl.parser import parse  # noqa: PLC0415

    tree, mistakes = parse(text, file)
    plan, more = check(tree)
    diagnostics = sorted((*mistakes, *more), key=_place)
    return None if diagnostics else plan, tuple(diagnostics)


def _place(diagnostic: Diagnostic) -> tuple[int, int, str]:
    span = diagnostic.span
    return (span.line, span.column, diagnostic.code) if span else (0, 0, diagnostic.code)
