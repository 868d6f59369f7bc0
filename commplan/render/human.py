"""Diagnostics for people: the source line, carets below it, notes and the fix."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commplan.diagnostics import Diagnostic, Severity, Span

_NEWLINE = re.compile(r"\r\n|\r|\n")  # the line breaks of the lexer
_WIDEST = 140  # most characters of an excerpt; longer lines are cut around the mark
_MOST_CODES = 4  # most codes in the summary line
# The parameters of terminal escape sequences (SGR).
_STYLES = {"error": "1;31", "warning": "1;33", "frame": "1;34", "note": "1;36", "fix": "1;32", "strong": "1"}


class _SourceMark(NamedTuple):
    """A span that is underlined in an excerpt.

    Attributes:
        span: the span.
        sign: the character that underlines it: `^` for the diagnostic, `-` for a note.
        label: the text after the underline; empty for none.
    """

    span: Span
    sign: str
    label: str


class _Paint(NamedTuple):
    """Adds a style of `_STYLES` to texts, if `color` is set."""

    color: bool

    def __call__(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.color and text else text


def human(diagnostics: Sequence[Diagnostic], texts: Mapping[str, str], color: bool) -> str:
    """Every diagnostic with an excerpt of its file, followed by a summary line."""
    lines = {file: _NEWLINE.split(text.removeprefix("\ufeff")) for file, text in texts.items()}
    paint = _Paint(color)
    blocks = [_block(diagnostic, lines.get(diagnostic.file), paint) for diagnostic in diagnostics]
    return "\n".join([*blocks, f"{_summary(diagnostics)}\n"])


def _summary(diagnostics: Sequence[Diagnostic]) -> str:
    """The number of errors and warnings, and the codes to look up, errors first."""
    errors = sum(d.severity is Severity.ERROR for d in diagnostics)
    counted = ((errors, "error"), (len(diagnostics) - errors, "warning"))
    counts = " and ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counted if count)
    codes = list(
        dict.fromkeys(d.code for d in sorted(diagnostics, key=lambda d: d.severity is not Severity.ERROR))
    )
    if len(codes) == 1:
        return f"{counts}; `commplan explain {codes[0]}` says more"
    named = codes[:_MOST_CODES] + ["..."] * (len(codes) > _MOST_CODES)
    return f"{counts}; `commplan explain CODE` says more of {', '.join(named)}"


def _block(d: Diagnostic, lines: Sequence[str] | None, paint: _Paint) -> str:
    """A diagnostic with its excerpt; `lines` are those of its file, or None if it was not read."""
    kind = str(d.severity)
    head, *more = d.message.splitlines() or [""]
    out = [f"{paint(f'{kind}[{d.code}]', kind)}: {paint(_shown(head), 'strong')}"]
    out += [paint(_shown(line), "strong") for line in more]
    notes = [note for note in d.notes if note.span is None]
    if lines is None or d.span is None:
        notes = list(d.notes)
        width = 1
        location = f"{_shown(d.file)}:{d.span.line}:{d.span.column}" if d.span else _shown(d.file)
        if location:
            out.append(f" {paint('-->', 'frame')} {location}")
    else:
        marks = [_SourceMark(d.span, "^", ""), *(_SourceMark(n.span, "-", n.text) for n in d.notes if n.span)]
        width = len(str(max(_last_line(mark.span) for mark in marks)))
        out.append(f"{' ' * width}{paint('-->', 'frame')} {d.file or '<plan>'}:{d.span.line}:{d.span.column}")
        out += _excerpt(marks, lines, width, kind, paint)
    for note in notes:
        out += _remark("note", note.text, width, paint, "note")
    if d.fix:
        out += _remark("fix", d.fix.title, width, paint, "fix")
    return "\n".join(line.rstrip() for line in out) + "\n"


def _remark(word: str, text: str, width: int, paint: _Paint, style: str) -> list[str]:
    """A note or a fix below an excerpt, whose line numbers have `width` digits."""
    first, *more = text.splitlines() or [""]
    lead = f"{' ' * width} {paint('=', 'frame')} "
    indent = " " * (width + 3 + len(word) + 2)
    return [f"{lead}{paint(word, style)}: {_shown(first)}", *(indent + _shown(line) for line in more)]


def _last_line(span: Span) -> int:
    """The last line of an excerpt: of a span of more than two lines, only the first is shown."""
    return span.end_line if span.end_line - span.line <= 1 else span.line


def _excerpt(
    marks: Sequence[_SourceMark], lines: Sequence[str], width: int, kind: str, paint: _Paint
) -> list[str]:
    """The marked lines in order, with the marks below each.

    Args:
        marks: the marks, that of the diagnostic first.
        lines: the lines of the file.
        width: the number of digits of the largest line number.
        kind: the style of the diagnostic's mark, `error` or `warning`.
        paint: adds the styles.
    """
    bar = paint("|", "frame")
    out = [f"{' ' * width} {bar}"]
    by_line: dict[int, list[_SourceMark]] = {}
    for mark in marks:
        for line in range(mark.span.line, _last_line(mark.span) + 1):
            by_line.setdefault(line, []).append(mark)
    shown = 0
    for number in sorted(by_line):
        if shown and number > shown + 1:
            out.append(paint("." * max(3, width), "frame"))
        shown = number
        text = lines[number - 1] if number <= len(lines) else ""
        window = _Window.around(text, min(_start(mark, number, text) for mark in by_line[number]))
        out.append(f"{paint(f'{number:>{width}}', 'frame')} {bar} {window.text}")
        for mark in by_line[number]:
            start, end = _start(mark, number, text), _end(mark, number, text)
            pad, length = window.columns(start, end)
            style = kind if mark.sign == "^" else "note"
            last = number == _last_line(mark.span)
            label = f" {mark.label.splitlines()[0]}" if mark.label and last else ""
            out.append(f"{' ' * width} {bar} {' ' * pad}{paint(mark.sign * length + label, style)}")
    return out


def _start(mark: _SourceMark, number: int, text: str) -> int:
    """The first column of a mark on line `number` with the content `text`."""
    return mark.span.column if number == mark.span.line else len(text) - len(text.lstrip()) + 1


def _end(mark: _SourceMark, number: int, text: str) -> int:
    """The column after a mark on line `number` with the content `text`."""
    return mark.span.end_column if number == mark.span.end_line else len(text) + 1


class _Window(NamedTuple):
    """A line for display, without tabs and control characters; long lines are cut around the mark.

    Attributes:
        text: the text to display.
        first: the column of its first character in the line, from 1.
        lead: the width of the ellipsis before it, 0 if there is none.
        source: the same part of the line, with tabs and control characters.
    """

    text: str
    first: int
    lead: int
    source: str

    @classmethod
    def around(cls, line: str, column: int) -> _Window:
        """The part of `line` to display for a mark at `column`, with a third of its width before the mark."""
        if len(line) <= _WIDEST:
            return cls(_shown(line), 1, 0, line)
        first = max(1, min(column - _WIDEST // 3, len(line) - _WIDEST + 1))
        piece = line[first - 1 : first - 1 + _WIDEST]
        before = "..." if first > 1 else ""
        after = "..." if first - 1 + _WIDEST < len(line) else ""
        return cls(f"{before}{_shown(piece)}{after}", first, len(before), piece)

    def columns(self, start: int, end: int) -> tuple[int, int]:
        """The screen column, from 0, and the width of a mark from column `start` to before `end`."""
        before = self.source[: max(0, start - self.first)]
        within = self.source[max(0, start - self.first) : max(0, end - self.first)]
        return self.lead + _width(before), max(1, _width(within))


def _shown(text: str) -> str:
    """Replace tabs by four spaces, and other unprintable characters by U+FFFD."""
    return "".join("    " if c == "\t" else c if c.isprintable() else "\ufffd" for c in text)


def _width(text: str) -> int:
    """The width of `_shown(text)` on a terminal, in columns. Wide characters of East Asia count twice."""
    marks = sum(unicodedata.combining(c) > 0 for c in text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" and not unicodedata.combining(c) for c in text)
    return len(text) + 3 * text.count("\t") + wide - marks
