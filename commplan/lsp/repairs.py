"""Code actions: fix a diagnostic, fix everything, or ignore a warning by a comment."""

from __future__ import annotations

from typing import NamedTuple

from commplan.diagnostics import Diagnostic, Severity, Span
from commplan.lint.ignores import ABOUT_COMMENTS
from commplan.lint.repairs import edits, repair
from commplan.lsp.document import PlanDocument


class Repair(NamedTuple):
    """A code action.

    Attributes:
        title: description for the editor's menu.
        edits: edits (start offset, end offset, new text), sorted by start.
        diagnostic: the diagnostic that it repairs; None for all of them.
        certain: whether it is safe to apply automatically.
    """

    title: str
    edits: tuple[tuple[int, int, str], ...]
    diagnostic: Diagnostic | None
    certain: bool


def repairs(document: PlanDocument, first: int, last: int) -> list[Repair]:
    """The code actions for diagnostics on lines `first` to `last`."""
    offered: list[Repair] = []
    for diagnostic in document.diagnostics:
        if diagnostic.span is None or diagnostic.span.line > last or diagnostic.span.end_line < first:
            continue
        if diagnostic.fix:
            changes = tuple(edits(document.text, [diagnostic.fix]))
            offered.append(Repair(diagnostic.fix.title, changes, diagnostic, certain=True))
        if diagnostic.severity is Severity.WARNING and diagnostic.code not in ABOUT_COMMENTS:
            offered.append(_ignore_repair(document, diagnostic, diagnostic.span))
    return offered


def all_repairs(document: PlanDocument) -> Repair | None:
    """One action that applies all safe fixes; None if there are none."""

    def found(text: str) -> tuple[Diagnostic, ...]:
        return PlanDocument(text, document.file).diagnostics

    text, count = repair(document.text, found)
    if not count:
        return None
    return Repair("apply all safe fixes", ((0, len(document.text), text),), None, certain=True)


def _ignore_repair(document: PlanDocument, warning: Diagnostic, span: Span) -> Repair:
    """Add an ignore comment to the line, or a code to an existing one."""
    offsets = document.offsets
    comments = [token for token in document.tokens if token.type == "COMMENT" and token.line == span.line]
    written = next((token for token in comments if "commplan: ignore CP" in token.text), None)
    if written:
        offset = offsets.offset(written.line, written.column + written.text.index("CP"))
        change = (offset, offset, f"{warning.code}, ")
    else:
        end = offsets.ends[span.line - 1]
        last = max(token.end_column for token in document.tokens if token.line == span.line)
        start = offsets.offset(span.line, last)
        change = (start, end, f"  # commplan: ignore {warning.code}")
        if comments:  # append the text of an existing comment
            start = offsets.offset(span.line, comments[0].column)
            text = comments[0].text.removeprefix("#").strip()
            change = (start, end, f"# commplan: ignore {warning.code}: {text}")
    return Repair(f"ignore {warning.code} here", (change,), warning, certain=False)
