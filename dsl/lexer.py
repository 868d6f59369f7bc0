"""Splits text into tokens: words, numbers with units, punctuation and comments, each with its position.

Lines and columns count from 1, in characters. A line ends at LF, CRLF or CR. The lexer never fails: text that
is not a token of the language becomes a `BAD` token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from commplan.diagnostics import Span
from commplan.ir import stages

# The words of the grammar, as token types.
# Words that begin a declaration.
DECLARES = frozenset({"PLAN", "AXIS", "ENSEMBLE", "SERVER", "SOURCE", "FN", "INPUT", "STATE", "TOPOLOGY"})
# Words that begin a phase.
HEADS = frozenset({"AT", "EACH", "EVERY", "PHASE"})
# Words that begin a stage, after `NAMES =`.
VERBS = frozenset(verb.upper() for verb in stages.VERBS)
# Words that begin a clause.
CLAUSES = frozenset(
    {
        "OVER", "ACROSS", "FROM", "BY", "VIA", "PER", "SPLIT", "PARTIAL", "WITH", "INTO", "VISIT", "SEED",
        "TAIL", "ON",
    }
)  # fmt: skip
# Names may not be any of these.
KEYWORDS = frozenset(word.lower() for word in DECLARES | HEADS | VERBS | CLAUSES | {"OUTPUT"})
# Names may be any of these: they are keywords in one position only.
SOFT = frozenset({"batch", "start", "step", "steps", "same", "in", "fragments", "hidden", "under"})

# Decimal units, which the language does not have, in bytes.
_DECIMAL_BYTES = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# The units of the language.
UNITS = ("KiB", "MiB", "GiB", "Mbit/s", "Gbit/s", "GB/s", "us", "ms", "s")
# The type of each punctuation token.
PUNCTUATION = {
    "=": "EQUAL", ":": "COLON", ",": "COMMA", "->": "ARROW", "?": "QUESTION",
    "(": "LPAR", ")": "RPAR", "[": "LSQB", "]": "RSQB", "{": "LBRACE", "}": "RBRACE",
}  # fmt: skip

_KEYWORD = "|".join(sorted(KEYWORDS))
_UNIT = "|".join(re.escape(unit) for unit in UNITS)
_TOKEN = re.compile(
    rf"""
      (?P<blank>[ \t\f]+)
    | (?P<newline>\r\n|\r|\n+)
    | (?P<comment>\#[^\r\n]*)
    | (?P<text>"[^"\r\n]*")
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>(?P<digits>-?\d[\d_]*(?:\.[\d_]*)?(?:[eE][+-]?\d+)?)
                 (?:[ \t]*(?P<unit>{_UNIT})(?![\w/])|(?!(?:{_KEYWORD})(?!\w))(?P<tail>[\w./%]+))?)
    | (?P<punctuation>->|[=:,?()\[\]{{}}])
    | (?P<junk>[^\s\#\w=:,?()\[\]{{}}-]+|[^\W\d]+|.)
    """,
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_WELL_FORMED = re.compile(r"-?\d+(?:_\d+)*(?:\.\d+(?:_\d+)*)?(?:[eE][+-]?\d+)?", re.ASCII)
_LONGEST_NUMBER = 40  # maximum number of characters of a number without its unit


class Token(NamedTuple):
    """A token.

    Attributes:
        type: NAME, INT, FLOAT, QUANTITY (a number with a unit), TEXT (quoted), COMMENT, BAD, a value of
            `PUNCTUATION`, or a keyword in capitals.
        text: The source of the token, with quotes and units.
        line: Its line, from 1.
        column: The column of its first character, from 1.
        end_column: The column after its last character.
        leads: Whether it is the first token on its line.
    """

    type: str
    text: str
    line: int
    column: int
    end_column: int
    leads: bool

    @property
    def span(self) -> Span:
        return Span(self.line, self.column, self.line, self.end_column)

    @property
    def is_word(self) -> bool:
        """Whether it has the form of a name: a name or any word of the language."""
        return self.type != "BAD" and (self.text[:1].isalpha() or self.text[:1] == "_")


def word_type(text: str) -> str:
    """The token type of a word: the word in capitals if it is in `KEYWORDS` or `SOFT`, else NAME."""
    return text.upper() if text in KEYWORDS or text in SOFT else "NAME"


def end_of(text: str) -> tuple[int, int]:
    """The line and the column after the last character of `text`, from 1."""
    line = 1 + text.count("\n") + text.count("\r") - text.count("\r\n")
    return line, len(text) - max(text.rfind("\n"), text.rfind("\r"))


def tokenize(text: str) -> Iterator[Token]:
    """Yield every token and comment (type COMMENT) of `text`, lazily and in linear time."""
    line, line_start, leads = 1, 0, True
    for match in _TOKEN.finditer(text):
        group = match.lastgroup
        start, end = match.span()
        if group == "blank":
            continue
        if group == "newline":
            line, line_start, leads = line + (end - start if text[start] == "\n" else 1), end, True
            continue
        lexeme = match.group()
        if group == "word":
            kind = word_type(lexeme)
        elif group == "punctuation":
            kind = PUNCTUATION[lexeme]
        elif group == "comment":
            kind = "COMMENT"
        elif group == "text":
            kind = "TEXT"
        elif group == "junk":
            kind = "BAD"
        else:
            kind = _number_type(match)
        yield Token(kind, lexeme, line, start - line_start + 1, end - line_start + 1, leads)
        leads = False


def _number_type(match: re.Match[str]) -> str:
    """The token type of a number; BAD if it is malformed, too long, too large or has an unknown unit."""
    digits = match["digits"]
    if match["tail"] or len(digits) > _LONGEST_NUMBER or not _WELL_FORMED.fullmatch(digits):
        return "BAD"
    if not math.isfinite(float(digits)):
        return "BAD"
    if match["unit"]:
        return "QUANTITY"
    return "INT" if isinstance(number_value(digits), int) else "FLOAT"


def split_number(text: str) -> tuple[str, str | None]:
    """Split the text of a well-formed INT, FLOAT or QUANTITY into digits and unit; None without a unit.

    >>> split_number("25 MiB")
    ('25', 'MiB')
    """
    match = _TOKEN.match(text)
    assert match and match["number"], text
    return match["digits"], match["unit"]


def number_value(digits: str) -> int | float:
    """The value of well-formed digits: an int unless they have a point or an exponent."""
    plain = digits.replace("_", "")
    return int(plain) if plain.removeprefix("-").isdigit() else float(plain)


def _other_unit(digits: str, unit: str) -> str | None:
    """A number with an unknown unit, rewritten with the same value.

    Decimal units of bytes become a whole number of bytes, and units in another case one of `UNITS`. None for
    other units, for units that are ambiguous, and for malformed numbers.
    """
    if not _WELL_FORMED.fullmatch(digits) or len(digits) > _LONGEST_NUMBER:
        return None
    if unit in _DECIMAL_BYTES:
        from fractions import Fraction  # noqa: PLC0415  (slow to import, and only for a message)

        nbytes = Fraction(digits.replace("_", "")) * _DECIMAL_BYTES[unit]
        return f"{nbytes.numerator:_}" if nbytes.denominator == 1 else None
    spellings = {spelling: each for each in UNITS for spelling in (each.lower(), each.upper())}
    del spellings["gb/s"]  # ambiguous with Gbit/s
    return f"{digits} {spellings[unit]}" if unit in spellings else None


def number_mistake(text: str) -> tuple[str, str | None]:
    """The reason why a BAD token that begins like a number is wrong, and the number that was probably meant.

    The number is None if it cannot be guessed.
    """
    match = _TOKEN.match(text)
    assert match and match["digits"], text
    digits, tail = match["digits"], match["tail"]
    if tail:
        return f"`{tail}` is not a unit; the units are {', '.join(UNITS)}", _other_unit(digits, tail)
    if len(digits) > _LONGEST_NUMBER:
        return f"a number has at most {_LONGEST_NUMBER} characters", None
    if not _WELL_FORMED.fullmatch(digits):
        return "`_` and `.` are allowed between digits only", None
    return "the number is too large", None
