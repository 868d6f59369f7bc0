"""Diagnostics: what went wrong, where, what was expected and found, and how to mend it.

A diagnostic is a value. Rooms make them; only `commplan.cli` and `str()` of an error turn them
into text. Every code has a page, `commplan/pages/CODE.md`, that `commplan explain CODE` prints.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NoReturn

import msgspec

MOST_LISTED = 24
MOST_COMPARED = 500  # names that one name is compared with
LONGEST_GUESS = 64  # letters of a name that is compared
CLOSE, MARGIN = 0.7, 0.1  # how alike a misspelling is, and how much less any other name is


class Severity(enum.StrEnum):
    """How bad it is. Only errors stop a compilation."""

    ERROR = "error"
    WARNING = "warning"


class Span(msgspec.Struct, frozen=True, order=True, gc=False):
    """A range of a `.plan` file. Lines and columns count from 1; the end column is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}-{self.end_line}:{self.end_column}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.line, self.column, other.end_line, other.end_column)


class Note(msgspec.Struct, frozen=True):
    """A remark that belongs to a diagnostic, with its own place where it has one."""

    text: str
    span: Span | None = None


class Fix(msgspec.Struct, frozen=True):
    """A replacement that is certain: put `text` in place of `span`."""

    title: str
    span: Span
    text: str


class Diagnostic(msgspec.Struct, frozen=True):
    """One mistake: a stable code, one sentence, its place, remarks and a fix where one is certain."""

    code: str
    message: str
    span: Span | None = None
    notes: tuple[Note, ...] = ()
    fix: Fix | None = None
    severity: Severity = Severity.ERROR
    file: str = ""

    def __str__(self) -> str:
        place = f"{self.file or '<plan>'}:{self.span.line}:{self.span.column}: " if self.span else ""
        lines = [f"{place}{self.severity}[{self.code}]: {self.message}"]
        lines += [f"  note: {note.text}" for note in self.notes]
        if self.fix:
            lines.append(f"  fix: {self.fix.title}")
        return "\n".join(lines)


class CommplanError(Exception):
    """A user's mistake, as diagnostics. Raised by every public call that cannot go on."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return "\n".join(str(diagnostic) for diagnostic in self.diagnostics)


def fail(code: str, message: str, *notes: str, span: Span | None = None, file: str = "") -> NoReturn:
    """Raise a `CommplanError` with one diagnostic; each of `notes` becomes a remark."""
    raise CommplanError(Diagnostic(code, message, span, tuple(Note(note) for note in notes), file=file))


def fail_if(problems: Sequence[Diagnostic]) -> None:
    """Raise a `CommplanError` with all of `problems`, where there are any."""
    if problems:
        raise CommplanError(*problems)


def text_of(error: BaseException) -> str:
    """`RuntimeError: no data here`; its kind alone where it has no text, or `str` of it fails."""
    with contextlib.suppress(Exception):
        if text := str(error).strip():
            return f"{type(error).__name__}: {text}"
    return type(error).__name__


def listed(names: Iterable[str], joint: str = "and") -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) > MOST_LISTED:
        return f"{', '.join(quoted[:MOST_LISTED])} {joint} {len(quoted) - MOST_LISTED} more"
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"


def near_names(name: str, known: Iterable[str]) -> list[tuple[str, float]]:
    """The names among `known` that `name` may be a misspelling of, nearest first, with how alike they are.

    Alike is `difflib.SequenceMatcher.ratio`, from 0.7 on, in whatever case; the same letters in another order
    count as 0.9. Long names, and names behind the first 500, are not compared.
    """
    from difflib import SequenceMatcher  # noqa: PLC0415  only mistakes need it

    if len(name) > LONGEST_GUESS:
        return []
    lower, matcher = name.lower(), SequenceMatcher()
    near: dict[str, float] = {}
    matcher.set_seq2(lower)
    for other in islice((other for other in known if len(other) <= LONGEST_GUESS), MOST_COMPARED):
        matcher.set_seq1(other.lower())
        if matcher.real_quick_ratio() < CLOSE or matcher.quick_ratio() < CLOSE:
            continue
        alike = matcher.ratio()
        if alike < 0.9 and sorted(lower) == sorted(other.lower()):
            alike = 0.9
        if alike >= CLOSE:
            near[other] = alike
    return sorted(near.items(), key=lambda item: -item[1])


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The one name among `known` that `name` certainly was meant to be: no other one is about as near."""
    (first, alike), (_, next_alike) = [*near_names(name, known), ("", 0.0), ("", 0.0)][:2]
    return first if alike - next_alike > MARGIN else None


def did_you_mean(name: str, known: Collection[str], otherwise: str) -> str:
    """The names among `known` that are near to `name`, two at most; else `otherwise`, and all of them."""
    return next(iter(near_note(name, known)), f"{otherwise} {', '.join(known) or 'none'}")


def near_note(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """A note with the names among `known` that are nearest to `name`, two at most; none if none is near."""
    near = near_names(name, known)
    likely = [other for other, alike in near if alike >= near[0][1] - MARGIN]
    return (f"did you mean {listed(likely[:2], 'or')}?",) if near else ()


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
