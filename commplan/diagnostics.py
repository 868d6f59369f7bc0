"""Diagnostics: errors and warnings about plans as values, and helpers that build their messages.

A diagnostic has a code, a message, a location, notes and a fix. Any package can create them, but only
`commplan.render`, the command and `str()` of an error format them as text. `commplan explain CODE` prints the
page of a code from `commplan/pages`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from types import ModuleType
from typing import NoReturn

import msgspec

MOST_LISTED = 24  # the most names that `listed` writes out
MOST_COMPARED = 500  # the most candidates that a name is compared with
LONGEST_GUESS = 64  # the length of the longest name that is compared, in characters
CLOSE = 0.7  # the least similarity of a suggestion, as a ratio between 0 and 1
MARGIN = 0.1  # the least difference in similarity between a certain suggestion and the second best
_PERMUTED = 0.9  # the least similarity of two names with the same letters in another order


class Severity(enum.StrEnum):
    """The severity of a diagnostic. Only errors stop a compilation."""

    ERROR = "error"
    WARNING = "warning"


class Span(msgspec.Struct, frozen=True, order=True, gc=False):
    """A range in a `.plan` file.

    Attributes:
        line: the first line, counted from 1.
        column: the first character in `line`, counted from 1 in Unicode code points.
        end_line: the last line, counted from 1.
        end_column: the column after the last character, in `end_line`.
    """

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
    """A remark of a diagnostic.

    Attributes:
        text: the remark, of one or several lines.
        span: the place in the diagnostic's file that the remark is about; None if it is about no place.
    """

    text: str
    span: Span | None = None


class Fix(msgspec.Struct, frozen=True):
    """A replacement of text in the plan that is certain to be correct.

    Attributes:
        title: the action, for editors and `commplan check --fix`.
        span: the text to replace, in the diagnostic's file.
        text: the new text.
    """

    title: str
    span: Span
    text: str


class Diagnostic(msgspec.Struct, frozen=True):
    """An error or a warning.

    Attributes:
        code: the stable code, `CP` and four digits (`commplan.errors`).
        message: the mistake, in one sentence.
        span: the location in `file`; None if there is none.
        notes: further remarks, such as the expected content or a suggestion.
        fix: a repair; None unless one is certain.
        severity: whether it stops a compilation.
        file: the name of the file; empty if unknown.
    """

    code: str
    message: str
    span: Span | None = None
    notes: tuple[Note, ...] = ()
    fix: Fix | None = None
    severity: Severity = Severity.ERROR
    file: str = ""

    def __str__(self) -> str:
        location = f"{self.file or '<plan>'}:{self.span.line}:{self.span.column}: " if self.span else ""
        lines = [f"{location}{self.severity}[{self.code}]: {self.message}"]
        lines += [f"  note: {note.text}" for note in self.notes]
        if self.fix:
            lines.append(f"  fix: {self.fix.title}")
        return "\n".join(lines)


class CommplanError(Exception):
    """A user's mistake, as diagnostics. Public functions raise it if they cannot continue.

    Attributes:
        diagnostics: the errors; empty if another process has already reported them.
    """

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return "\n".join(str(diagnostic) for diagnostic in self.diagnostics)


def fail(code: str, message: str, *notes: str, span: Span | None = None, file: str = "") -> NoReturn:
    """Raise a `CommplanError` with one diagnostic; its fields are those of `Diagnostic`."""
    raise CommplanError(Diagnostic(code, message, span, tuple(Note(note) for note in notes), file=file))


def fail_if(problems: Sequence[Diagnostic]) -> None:
    """Raise a `CommplanError` with all of `problems`, if there are any."""
    if problems:
        raise CommplanError(*problems)


def import_optional(module: str, code: str, purpose: str, package: str) -> ModuleType:
    """Import `module` of an optional package.

    Args:
        module: the module.
        code: the code of the error.
        purpose: a plural noun for the features that need the module, for the error.
        package: the argument of `pip install` that installs it, for the error.

    Raises:
        CommplanError: `code` if the package is not installed.
        ModuleNotFoundError: the package is installed, but one of its own imports is not.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != top:
            raise
        fail(code, f"{purpose} need {top}, which is not installed", f"pip install {package}")


def text_of(error: BaseException) -> str:
    """The type and text of an error, as in `RuntimeError: no data here`.

    Without a text, or if `str` of the error fails, this is the type alone.
    """
    with contextlib.suppress(Exception):
        if text := str(error).strip():
            return f"{type(error).__name__}: {text}"
    return type(error).__name__


def listed(names: Iterable[str], joint: str = "and") -> str:
    """Join quoted names: `a`, `b` and `c`. Names after the first 24 are only counted."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) > MOST_LISTED:
        return f"{', '.join(quoted[:MOST_LISTED])} {joint} {len(quoted) - MOST_LISTED} more"
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"


def near_names(name: str, candidates: Iterable[str]) -> list[tuple[str, float]]:
    """The candidates that `name` may misspell, most similar first, with their similarities.

    The similarity is `difflib.SequenceMatcher.ratio`, ignoring case; at least 0.7 is required. Permutations
    of letters have at least 0.9. Names and candidates of more than 64 characters are not compared, nor are
    candidates after the first 500 shorter ones.
    """
    from difflib import SequenceMatcher  # noqa: PLC0415  imported only for errors

    if len(name) > LONGEST_GUESS:
        return []
    lower = name.lower()
    matcher = SequenceMatcher()
    near: dict[str, float] = {}
    matcher.set_seq2(lower)
    for other in islice((other for other in candidates if len(other) <= LONGEST_GUESS), MOST_COMPARED):
        matcher.set_seq1(other.lower())
        if matcher.real_quick_ratio() < CLOSE or matcher.quick_ratio() < CLOSE:
            continue
        similarity = matcher.ratio()
        if similarity < _PERMUTED and sorted(lower) == sorted(other.lower()):
            similarity = _PERMUTED
        if similarity >= CLOSE:
            near[other] = similarity
    return sorted(near.items(), key=lambda item: -item[1])


def near_name(name: str, candidates: Iterable[str]) -> str | None:
    """The most similar candidate, or None unless it exceeds the second best by more than `MARGIN`."""
    (first, alike), (_, next_alike) = [*near_names(name, candidates), ("", 0.0), ("", 0.0)][:2]
    return first if alike - next_alike > MARGIN else None


def did_you_mean(name: str, candidates: Collection[str], otherwise: str) -> str:
    """A suggestion of at most two similar candidates, or else `otherwise` followed by all candidates."""
    return next(iter(near_note(name, candidates)), f"{otherwise} {', '.join(candidates) or 'none'}")


def near_note(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """A note with the one or two candidates most similar to `name`, or no note."""
    near = near_names(name, candidates)
    likely = [other for other, similarity in near if similarity >= near[0][1] - MARGIN]
    return (f"did you mean {listed(likely[:2], 'or')}?",) if near else ()


def plural(count: int, word: str) -> str:
    """The count and the noun, with an `s` unless the count is 1."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def with_article(noun: str) -> str:
    """The noun after `a` or `an`, by its first letters.

    >>> [with_article(noun) for noun in ("axis", "uint8", "ndarray", "Union", "HTTPError")]
    ['an axis', 'a uint8', 'an ndarray', 'a Union', 'an HTTPError']
    """
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def type_of(value: object) -> str:
    """The type of a value, with its article.

    >>> type_of(3), type_of({}), type_of(None)
    ('an int', 'a dict', 'None')
    """
    return "None" if value is None else with_article(type(value).__name__)


# Matches nouns that take `an`: `an Unpack` but `a Union`, and by the names of letters `an MPIComm`, `an x`
# and `an ndarray`.
_VOWEL = re.compile(r"_*([aeiAEI]|[oO](?!ne)|[uU][np](?!i)|[FHLMNRSX](?![a-z])|[fhlmnrsx](?![a-zA-Z])|nd)")
