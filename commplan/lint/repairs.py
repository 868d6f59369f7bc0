"""Fixes put into a text: what is certain, and nothing else of it changes."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from commplan.diagnostics import Diagnostic, Fix, Span

MOST_ROUNDS = 10
_NEWLINE = re.compile(r"\r\n|\r|\n")


class Places:
    """Offsets into a text by line and column, and back; a byte order mark takes no column."""

    def __init__(self, text: str) -> None:
        self.text = text
        mark = int(text.startswith("\ufeff"))
        self.starts = [mark, *(match.end() for match in _NEWLINE.finditer(text))]
        self.ends = [*(match.start() for match in _NEWLINE.finditer(text)), len(text)]

    def offset(self, line: int, column: int) -> int:
        """The offset of a place; one behind the end of its line is that end."""
        if line > len(self.starts):
            return len(self.text)
        return min(self.starts[line - 1] + column - 1, self.ends[line - 1])

    def range(self, span: Span) -> tuple[int, int]:
        """The offsets of a span."""
        return self.offset(span.line, span.column), self.offset(span.end_line, span.end_column)

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset."""
        line = bisect_right(self.starts, offset)
        return max(line, 1), offset - self.starts[max(line, 1) - 1] + 1


def edits(text: str, fixes: Iterable[Fix]) -> list[tuple[int, int, str]]:
    """What to replace, as start, end and text, in order: of fixes that overlap the first. A deletion
    takes the space before it along, and the line that it leaves empty."""
    places = Places(text)
    chosen = list[tuple[int, int, str]]()
    for fix in sorted(fixes, key=lambda fix: fix.span):
        start, end = places.range(fix.span)
        if not fix.text:
            start, end = _widened(places, start, end)
        if not chosen or start >= chosen[-1][1]:
            chosen.append((start, end, fix.text))
    return chosen


def _widened(places: Places, start: int, end: int) -> tuple[int, int]:
    """What is deleted up to the end of its line leaves no space behind, and no empty line."""
    line = places.place(start)[0]
    if end != places.ends[line - 1]:
        return start, end
    before = places.text[places.starts[line - 1] : start]
    start -= len(before) - len(before.rstrip())
    if before.strip() or line >= len(places.starts):
        return start, end
    return places.starts[line - 1], places.starts[line]


def applied(text: str, fixes: Iterable[Fix]) -> tuple[str, int]:
    """`text` with the fixes, and how many of them were put in."""
    chosen = edits(text, fixes)
    for start, end, new in reversed(chosen):
        text = text[:start] + new + text[end:]
    return text, len(chosen)


def repaired(text: str, find: Callable[[str], Sequence[Diagnostic]]) -> tuple[str, int]:
    """`text` with every fix that `find` gives of it, and of what that shows, and how many were put in.

    find: all that is wrong with a text. Ends where a text comes back that was there before.
    """
    seen, total = {text}, 0
    for _ in range(MOST_ROUNDS):
        better, count = applied(text, [each.fix for each in find(text) if each.fix])
        if better in seen:
            break
        seen.add(better)
        text, total = better, total + count
    return text, total
