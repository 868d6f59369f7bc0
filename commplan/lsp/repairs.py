"""Code actions: fixes of diagnostics, all of them at once, and a comment that takes a warning back."""

from __future__ import annotations

from typing import NamedTuple

from commplan.diagnostics import Diagnostic, Severity, Span
from commplan.lint.ignores import ABOUT_COMMENTS
from commplan.lint.repairs import edits, repaired
from commplan.lsp.document import Document


class Repair(NamedTuple):
    """What may be done: in words, the edits as offsets and text, and the diagnostic that it is about.

    certain: it can be done without a look.
    """

    title: str
    edits: tuple[tuple[int, int, str], ...]
    about: Diagnostic | None
    certain: bool


def repairs(document: Document, first: int, last: int) -> list[Repair]:
    """What may be done about the diagnostics on the lines `first` to `last`."""
    offered: list[Repair] = []
    for each in document.diagnostics:
        if each.span is None or each.span.line > last or each.span.end_line < first:
            continue
        if each.fix:
            changes = tuple(edits(document.text, [each.fix]))
            offered.append(Repair(each.fix.title, changes, each, certain=True))
        if each.severity is Severity.WARNING and each.code not in ABOUT_COMMENTS:
            offered.append(_ignored(document, each, each.span))
    return offered


def all_repairs(document: Document) -> Repair | None:
    """Everything that is certain, put right at once."""

    def found(text: str) -> tuple[Diagnostic, ...]:
        return Document(text, document.file).diagnostics

    text, count = repaired(document.text, found)
    if not count:
        return None
    return Repair("put right all that is certain", ((0, len(document.text), text),), None, certain=True)


def _ignored(document: Document, warning: Diagnostic, span: Span) -> Repair:
    """The comment behind the line, or its code in one that is there."""
    places = document.places
    comments = [each for each in document.tokens if each.type == "COMMENT" and each.line == span.line]
    written = next((each for each in comments if "commplan: ignore CP" in each.text), None)
    if written:
        offset = places.offset(written.line, written.column + written.text.index("CP"))
        change = (offset, offset, f"{warning.code}, ")
    else:
        end = places.ends[span.line - 1]
        last = max(token.end_column for token in document.tokens if token.line == span.line)
        start = places.offset(span.line, last)
        change = (start, end, f"  # commplan: ignore {warning.code}")
        if comments:  # a comment that is there comes behind ours
            start = places.offset(span.line, comments[0].column)
            text = comments[0].text.removeprefix("#").strip()
            change = (start, end, f"# commplan: ignore {warning.code}: {text}")
    return Repair(f"ignore {warning.code} here", (change,), warning, certain=False)
