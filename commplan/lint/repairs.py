"""Apply safe fixes to a text, for `commplan check --fix` and the language server."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from commplan.diagnostics import Diagnostic, Fix, Span

MAX_ROUNDS = 10  # most rounds of fixes; a fix may reveal another mistake
_NEWLINE = re.compile(r"\r\n|\r|\n")  # the line breaks of the lexer


class TextOffsets:
    """Converts between 0-based offsets and 1-based lines and columns, in characters.

    A byte order mark has no column.

    Attributes:
        text: the text.
        starts: the offset of each line's first character.
        ends: the offset after each line's last character, without the line break.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        first = int(text.startswith("\ufeff"))
        self.starts = [first, *(match.end() for match in _NEWLINE.finditer(text))]
        self.ends = [*(match.start() for match in _NEWLINE.finditer(text)), len(text)]

    def offset(self, line: int, column: int) -> int:
        """The offset of a location; columns past the end of a line are clipped."""
        if line > len(self.starts):
            return len(self.text)
        return min(self.starts[line - 1] + column - 1, self.ends[line - 1])

    def offsets_of(self, span: Span) -> tuple[int, int]:
        """The start and end offsets of a span."""
        return self.offset(span.line, span.column), self.offset(span.end_line, span.end_column)

    def location(self, offset: int) -> tuple[int, int]:
        """The line and column of an offset; column 0 for a byte order mark."""
        line = bisect_right(self.starts, offset)
        return max(line, 1), offset - self.starts[max(line, 1) - 1] + 1


def edits(text: str, fixes: Iterable[Fix]) -> list[tuple[int, int, str]]:
    """Convert fixes to edits (start offset, end offset, new text), sorted by start.

    Of overlapping fixes only the first is used.

    A deletion at the end of a line includes the preceding whitespace, or the whole line if it becomes empty
    and is not the last.
    """
    offsets = TextOffsets(text)
    chosen = list[tuple[int, int, str]]()
    for fix in sorted(fixes, key=lambda fix: fix.span):
        start, end = offsets.offsets_of(fix.span)
        if not fix.text:
            start, end = _widen(offsets, start, end)
        if not chosen or start >= chosen[-1][1]:
            chosen.append((start, end, fix.text))
    return chosen


def _widen(offsets: TextOffsets, start: int, end: int) -> tuple[int, int]:
    """Extend a deletion; see `edits`."""
    line = offsets.location(start)[0]
    if end != offsets.ends[line - 1]:
        return start, end
    before = offsets.text[offsets.starts[line - 1] : start]
    start -= len(before) - len(before.rstrip())
    if before.strip() or line >= len(offsets.starts):
        return start, end
    return offsets.starts[line - 1], offsets.starts[line]


def apply_fixes(text: str, fixes: Iterable[Fix]) -> tuple[str, int]:
    """Apply fixes to `text`; returns the new text and the number of fixes that were applied."""
    chosen = edits(text, fixes)
    for start, end, new in reversed(chosen):
        text = text[:start] + new + text[end:]
    return text, len(chosen)


def repair(text: str, find: Callable[[str], Sequence[Diagnostic]]) -> tuple[str, int]:
    """Apply fixes repeatedly until none is left, a text recurs, or `MAX_ROUNDS` is reached.

    Args:
        text: the text.
        find: returns the diagnostics of a text.

    Returns:
        The new text and the number of fixes.
    """
    previous_texts, total = {text}, 0
    for _ in range(MAX_ROUNDS):
        better, count = apply_fixes(text, [diagnostic.fix for diagnostic in find(text) if diagnostic.fix])
        if better in previous_texts:
            break
        previous_texts.add(better)
        text, total = better, total + count
    return text, total
