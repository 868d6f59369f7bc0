"""Renaming of symbols in a plan, without changing the meaning of other names."""

from __future__ import annotations

import re

from commplan.diagnostics import Fix, Span, fail
from commplan.dsl.lexer import KEYWORDS
from commplan.lint.repairs import apply_fixes
from commplan.lsp.document import PlanDocument
from commplan.lsp.symbols import Symbol

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)  # a valid name


def renamed(document: PlanDocument, line: int, column: int, name: str) -> list[Span]:
    """Return the spans to replace with `name` to rename the symbol at a location.

    Rebinding a name creates a new value, which is not renamed.

    Args:
        document: the document.
        line: line number, from 1.
        column: column number, from 1.
        name: the new name.

    Returns:
        The locations of the old name, sorted.

    Raises:
        CommplanError: CP1117 if there is no symbol, `name` is invalid, or other names would change their
            meaning.
    """
    use = document.symbols.at(line, column)
    if use is None or use.symbol is None:
        fail("CP1117", "there is no name to rename here", "names of declarations and values can be renamed")
    if not _NAME.fullmatch(name) or name in KEYWORDS:
        kind = "a word of the language" if name in KEYWORDS else "no name"
        fail("CP1117", f"`{name}` is {kind}", "a name has letters, digits and `_`, and begins with no digit")
    spans = sorted(use.symbol.places)
    text, _ = apply_fixes(document.text, [Fix("", span, name) for span in spans])
    other = PlanDocument(text)
    if _meanings(other) != _meanings(document) or len(other.diagnostics) > len(document.diagnostics):
        note = "it would hide another name, or be hidden by it: choose a name that is not in the plan"
        fail("CP1117", f"`{name}` would mean something else in the plan", note)
    return spans


def _meanings(document: PlanDocument) -> list[int | None]:
    """For each use of a name in the text, the index of the first use of its symbol; None if undefined.

    Renaming preserves it unless a name is captured.
    """
    first: dict[Symbol, int] = {}
    uses = document.symbols.uses
    return [first.setdefault(use.symbol, number) if use.symbol else None for number, use in enumerate(uses)]
