"""Inlay hints: the placement of each value, after its name."""

from __future__ import annotations

from typing import NamedTuple

from commplan.dsl import ast
from commplan.lsp.document import PlanDocument


class Hint(NamedTuple):
    """A text that editors display at a location, between the characters of the plan.

    Attributes:
        line: the line, from 1.
        column: the column, from 1.
        text: the text.
        tooltip: text that is shown if the hint is pointed at.
    """

    line: int
    column: int
    text: str
    tooltip: str


def placements(document: PlanDocument, first: int, last: int) -> list[Hint]:
    """The hints of the lines `first` to `last`."""
    hints: list[Hint] = []
    for phase in document.symbols.phases:
        for statement in phase.body:
            if not isinstance(statement, ast.StageStmt) or not first <= statement.span.line <= last:
                continue
            for name in statement.targets:
                value = document.symbols.values.get(name.span)
                if value is not None:
                    span, text = name.span, f": {value.placement}"
                    hints.append(
                        Hint(span.end_line, span.end_column, text, f"{value.type}, {value.placement}")
                    )
    return hints
