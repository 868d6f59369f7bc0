"""The formatter behind `commplan fmt`.

It works on tokens, so it changes only the whitespace between them. Consecutive lines of one kind are aligned:
declarations at `=` and `:`, stages at `=`. The columns of `fn` lines (at the parenthesis and the arrow) are
kept if they were aligned in the source. A stage that does not fit on a line is broken before a clause.
Comments stay in place; trailing comments keep their distance, and stay aligned if they were. Runs of blank
lines become one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Literal, NamedTuple

from commplan.diagnostics import fail_if
from commplan.dsl.lexer import Token, tokenize
from commplan.dsl.line_layout import flat, lay_out
from commplan.dsl.parser import parse
from commplan.dsl.statements import PhaseOpen, Statement, split

WIDTH = 110  # characters of a line

# The kinds of lines: `size` are declarations with `=`, `type` those with `:`, `open` and `close` the ends of
# a phase.
Kind = Literal["comment", "plan", "size", "type", "fn", "topology", "stage", "output", "open", "close"]

# The kind of a statement by the type of its first token; others are stages.
_DECLARED: dict[str, Kind] = {
    "PLAN": "plan", "AXIS": "size", "ENSEMBLE": "size", "SERVER": "size",
    "SOURCE": "type", "INPUT": "type", "STATE": "type", "FN": "fn",
    "TOPOLOGY": "topology", "OUTPUT": "output",
}  # fmt: skip
# The token at which lines of a kind are aligned.
_MARKS: dict[Kind, str] = {"size": "EQUAL", "type": "COLON", "stage": "EQUAL"}


class _FormatEntry(NamedTuple):
    """A statement, phase header, closing brace or comment line of the output.

    Attributes:
        kind: Its kind.
        tokens: Its tokens; for a comment line, the comment.
        inner: The comments between tokens, by the index of the preceding token.
        trailing: The comment after the last token, on the same line; None if there is none.
        blank: Whether a blank line precedes it.
        indent: The number of spaces before it.
    """

    kind: Kind
    tokens: tuple[Token, ...]
    inner: dict[int, tuple[Token, ...]]
    trailing: Token | None
    blank: bool
    indent: int


def format_source(text: str, file: str) -> str:
    """Format a plan.

    Args:
        text: The source of the plan.
        file: The file name to show in diagnostics.

    Returns:
        The formatted text. It ends with a newline, has CRLF line ends if `text` contains one, and no byte
        order mark.

    Raises:
        CommplanError: The syntax errors, if the text does not parse.
    """
    _, mistakes = parse(text, file)
    fail_if(mistakes)
    entries = _normalize_blank_lines(list(_EntryReader(text.removeprefix("\ufeff")).entries()))
    lines: list[str] = []
    for run in _runs(entries):
        texts = _columns(run)
        for entry, written in zip(run, texts, strict=True):
            if entry.blank and lines:
                lines.append("")
            lines.extend(written)
    newline = "\r\n" if "\r\n" in text else "\n"
    return newline.join([*lines, ""])


class _EntryReader:
    """Reads a text in order as entries, and attaches each comment to its entry."""

    def __init__(self, text: str) -> None:
        tokens = list(tokenize(text))
        self.comments = deque(token for token in tokens if token.type == "COMMENT")  # not yet attached
        self.pieces = _pieces(iter([token for token in tokens if token.type != "COMMENT"]))
        self.indent = 0
        self.last_line = 0  # the line of the last entry that was read; 0 before the first one

    def entries(self) -> Iterator[_FormatEntry]:
        """Yield the entries in order, with indentation and blank lines as in the source."""
        following = [tokens[0] for _, tokens in self.pieces[1:]]
        for (kind, tokens), after in zip_longest(self.pieces, following):
            yield from self._above(tokens[0])
            if kind == "close":
                self.indent = 0
            entry = self._entry(kind, tokens, after)
            if kind != "open":
                yield entry
                continue
            self.indent = 4
            # Comments before the brace move behind it: the first to the same line, the others below.
            inner = [comment for index in sorted(entry.inner) for comment in entry.inner[index]]
            inner += [entry.trailing] if entry.trailing else []
            yield entry._replace(inner={}, trailing=inner[0] if inner else None)
            for comment in inner[1:]:
                yield _FormatEntry("comment", (comment,), {}, None, False, self.indent)
        yield from self._above(None)

    def _entry(self, kind: Kind, tokens: tuple[Token, ...], after: Token | None) -> _FormatEntry:
        """Make an entry with the comments between and after its tokens; `after` is the next token."""
        inner: dict[int, tuple[Token, ...]] = {}
        for index, token in enumerate(tokens[1:]):
            while self._next_stands_before(token):
                inner[index] = (*inner.get(index, ()), self.comments.popleft())
        blank = self._follows_blank(tokens[0])
        self.last_line = tokens[-1].line
        trailing = None
        if self.comments and self.comments[0].line == self.last_line:
            between = after is not None and after.line == self.last_line and _before(after, self.comments[0])
            trailing = None if between else self.comments.popleft()
        return _FormatEntry(kind, tokens, inner, trailing, blank, self.indent)

    def _above(self, token: Token | None) -> Iterator[_FormatEntry]:
        """Yield the comment lines before `token`."""
        while self._next_stands_before(token):
            comment = self.comments.popleft()
            blank = self._follows_blank(comment)
            self.last_line = comment.line
            yield _FormatEntry("comment", (comment,), {}, None, blank, self.indent)

    def _next_stands_before(self, token: Token | None) -> bool:
        """Whether the next comment precedes `token`, or the end of the text if that is None."""
        return bool(self.comments) and (token is None or _before(self.comments[0], token))

    def _follows_blank(self, token: Token) -> bool:
        """Whether a blank line precedes `token`, which begins an entry."""
        return 0 < self.last_line < token.line - 1


def _pieces(code: Iterator[Token]) -> list[tuple[Kind, tuple[Token, ...]]]:
    """The kind and the tokens of each entry except comments. The tokens have no syntax errors."""
    pieces: list[tuple[Kind, tuple[Token, ...]]] = []
    for event in split(code, lambda diagnostic: None):
        match event:
            case Statement():
                pieces.append((_DECLARED.get(event.tokens[0].type, "stage"), event.tokens))
            case PhaseOpen():
                assert event.brace is not None
                pieces.append(("open", (*event.tokens, event.brace)))
            case _:
                assert event.brace is not None
                pieces.append(("close", (event.brace,)))
    return pieces


def _before(comment: Token, token: Token) -> bool:
    return (comment.line, comment.column) < (token.line, token.column)


def _normalize_blank_lines(entries: list[_FormatEntry]) -> list[_FormatEntry]:
    """Normalize blank lines: none at either end of a phase, one around it and after `plan`.

    Comments directly above a phase belong to it. Changes `entries` in place.
    """
    for index, entry in enumerate(entries):
        previous = entries[index - 1] if index else None
        if previous and (previous.kind == "open" or entry.kind == "close"):
            entries[index] = entry._replace(blank=False)
        elif previous and previous.kind in ("close", "plan"):
            entries[index] = entry._replace(blank=True)
        elif entry.kind == "open":
            first = index
            while first and entries[first - 1].kind == "comment" and not entries[first].blank:
                first -= 1
            entries[first] = entries[first]._replace(blank=True)
    return entries


def _runs(entries: Sequence[_FormatEntry]) -> Iterator[list[_FormatEntry]]:
    """Group adjacent entries of one kind. Blank lines end a group, comment lines do not."""
    run: list[_FormatEntry] = []
    kind: Kind | None = None
    for entry in entries:
        follows = entry.kind in ("comment", kind) or kind is None
        if run and (entry.blank or not follows):
            yield run
            run, kind = [], None
        run.append(entry)
        if entry.kind != "comment":
            kind = entry.kind
    if run:
        yield run


def _columns(run: Sequence[_FormatEntry]) -> list[list[str]]:
    """The aligned lines of each entry of a group."""
    heads = _heads(run)
    written: list[list[str]] = []
    for entry, (head, tail) in zip(run, heads, strict=True):
        if entry.kind == "comment":
            written.append([" " * entry.indent + entry.tokens[0].text.rstrip()])
            continue
        start = len(entry.tokens) - len(tail)
        inner = {index - start: comments for index, comments in entry.inner.items()}
        column = len(head) if head.strip() else entry.indent + 4
        written.append(lay_out(head, tail, inner, column, WIDTH))
    return _with_trailing(run, written)


def _heads(run: Sequence[_FormatEntry]) -> list[tuple[str, tuple[Token, ...]]]:
    """The aligned start of each entry of a group, and the tokens after it.

    The start extends to the mark of the kind (`_MARKS`). For other kinds it is only the indentation.
    """
    kind = next((entry.kind for entry in run if entry.kind != "comment"), "comment")
    if kind == "fn":
        return _fn_heads(run)
    if kind not in _MARKS:
        return [(" " * entry.indent, entry.tokens) for entry in run]
    # For each entry: its keyword, its names, its mark, and the tokens after it.
    cells: list[tuple[str, str, str, tuple[Token, ...]]] = []
    for entry in run:
        if entry.kind == "comment":
            cells.append(("", "", "", ()))
            continue
        mark_index = next(i for i, token in enumerate(entry.tokens) if token.type == _MARKS[kind])
        keyword_count = 0 if kind == "stage" else 1
        keyword_text = flat(entry.tokens[:keyword_count])
        names_text = flat(entry.tokens[keyword_count:mark_index])
        cells.append(
            (keyword_text, names_text, entry.tokens[mark_index].text, entry.tokens[mark_index + 1 :])
        )
    keyword_width = max(len(cell[0]) for cell in cells)
    names_width = max(len(cell[1]) for cell in cells)
    heads: list[tuple[str, tuple[Token, ...]]] = []
    for entry, (keyword_text, names_text, mark, tail) in zip(run, cells, strict=True):
        keyword_column = f"{keyword_text:<{keyword_width}} " if keyword_width else ""
        heads.append((f"{' ' * entry.indent}{keyword_column}{names_text:<{names_width}} {mark} ", tail))
    return heads


def _fn_heads(run: Sequence[_FormatEntry]) -> list[tuple[str, tuple[Token, ...]]]:
    """The start of each entry of a group of functions: `fn NAME(TYPES) -> ` or `fn NAME = `.

    The parentheses are aligned only if a space in the source precedes one of them. The arrows and `=` are
    aligned only if several spaces precede one of them. An entry with comments inside, or too long for a line,
    is not aligned.
    """
    plain = [entry for entry in run if entry.kind == "fn" and not entry.inner]
    signed = [entry for entry in plain if entry.tokens[2].type == "LPAR"]
    names_wide = any(_gap_before(entry, 2) > 0 for entry in signed)
    marks_wide = any(_gap_before(entry, _mark(entry)) > 1 for entry in plain)
    name_width = max((len(entry.tokens[1].text) for entry in signed), default=0) if names_wide else 0
    prefixes: list[str] = []
    for entry in run:
        if entry.kind != "fn" or entry.inner:
            prefixes.append("")
            continue
        signature = flat(entry.tokens[2 : _mark(entry)])
        prefixes.append(f"fn {entry.tokens[1].text:<{name_width}}{signature}".rstrip())
    width = max(len(prefix) for prefix in prefixes) if marks_wide else 0
    heads: list[tuple[str, tuple[Token, ...]]] = []
    for entry, prefix in zip(run, prefixes, strict=True):
        if not prefix or len(prefix) + 4 > WIDTH:
            heads.append((" " * entry.indent, entry.tokens))
        else:
            mark = _mark(entry)
            heads.append((f"{prefix:<{width}} {entry.tokens[mark].text} ", entry.tokens[mark + 1 :]))
    return heads


def _mark(entry: _FormatEntry) -> int:
    """The index of the `->` of a function, or of the `=` of a built-in one without types."""
    return next(i for i, token in enumerate(entry.tokens) if token.type in ("ARROW", "EQUAL"))


def _gap_before(entry: _FormatEntry, index: int) -> int:
    """The number of spaces before a token in the source."""
    return _gap(entry.tokens[index - 1], entry.tokens[index])


def _gap(before: Token, token: Token) -> int:
    """The number of characters between two tokens in the source; 0 if they are on different lines."""
    return token.column - before.end_column if token.line == before.line else 0


def _with_trailing(run: Sequence[_FormatEntry], written: list[list[str]]) -> list[list[str]]:
    """Append the trailing comments of a group to its lines, in place.

    Adjacent comments that shared a column stay aligned. The distance is that of the source, at least 2.
    """
    triples = [(entry.tokens[-1], entry.trailing, lines) for entry, lines in zip(run, written, strict=True)]
    for column, group in groupby(triples, key=lambda triple: triple[1].column if triple[1] else None):
        neighbors = [(last, comment, lines) for last, comment, lines in group if comment]
        if column is not None:
            gap = min(_gap(last, comment) for last, comment, _ in neighbors)
            width = max(len(lines[-1]) for *_, lines in neighbors) + max(2, gap)
            for _, comment, lines in neighbors:
                lines[-1] = f"{lines[-1]:<{width}}{comment.text.rstrip()}"
    return written
