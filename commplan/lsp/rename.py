"""Renaming: every place of a name, and nothing that another name means."""

from __future__ import annotations

import re

from commplan.diagnostics import Fix, Span, fail
from commplan.dsl.lexer import KEYWORDS
from commplan.lint.repairs import applied
from commplan.lsp.document import Document
from commplan.lsp.symbols import Symbol

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def renamed(document: Document, line: int, column: int, name: str) -> list[Span]:
    """The places to write `name` at, for the symbol at a place.

    Binding a name again makes another value, which keeps its name. Raises CP1117 where there is no name to
    rename, `name` is none, or something in the plan would mean something else.
    """
    use = document.symbols.at(line, column)
    if use is None or use.symbol is None:
        fail("CP1117", "there is no name to rename here", "names of declarations and values can be renamed")
    if not _NAME.fullmatch(name) or name in KEYWORDS:
        kind = "a word of the language" if name in KEYWORDS else "no name"
        fail("CP1117", f"`{name}` is {kind}", "a name has letters, digits and `_`, and begins with no digit")
    places = sorted(use.symbol.places)
    text, _ = applied(document.text, [Fix("", place, name) for place in places])
    other = Document(text)
    if _meanings(other) != _meanings(document) or len(other.diagnostics) > len(document.diagnostics):
        note = "another name would be hidden, or this one: choose one that the plan does not have"
        fail("CP1117", f"`{name}` would mean something else in the plan", note)
    return places


def _meanings(document: Document) -> list[int | None]:
    """For each name in the order of the text, the first place that names the same."""
    first: dict[Symbol, int] = {}
    uses = document.symbols.uses
    return [first.setdefault(use.symbol, number) if use.symbol else None for number, use in enumerate(uses)]
