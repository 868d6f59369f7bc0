"""Inlay hints: behind each name that a stage binds, how the value lies."""

from __future__ import annotations

from typing import NamedTuple

from commplan.dsl import ast
from commplan.lsp.document import Document


class Hint(NamedTuple):
    """A text that stands behind a place, and what is said of it."""

    line: int
    column: int
    text: str
    tooltip: str


def placements(document: Document, first: int, last: int) -> list[Hint]:
    """The hints of the lines `first` to `last`."""
    hints: list[Hint] = []
    for phase in document.symbols.phases:
        for statement in phase.body:
            if not isinstance(statement, ast.StageStmt) or not first <= statement.span.line <= last:
                continue
            for name in statement.targets:
                value = document.symbols.values.get(name.span)
                if value is not None:
                    place, text = name.span, f": {value.placement}"
                    hints.append(
                        Hint(place.end_line, place.end_column, text, f"{value.type}, {value.placement}")
                    )
    return hints
