"""Whitespace between the tokens of one statement, and its line breaks, for the formatter (`format`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commplan.dsl.lexer import Token, split_number
from commplan.dsl.statements import CONTINUES

_OPENERS = frozenset({"LPAR", "LSQB", "LBRACE"})
_CLOSERS = frozenset({"RPAR", "RSQB", "RBRACE"})


def flat(tokens: Sequence[Token]) -> str:
    """The text of the tokens on one line; "" without tokens."""
    text = ""
    for index, token in enumerate(tokens):
        text += _space(tokens[index - 1], token) + _text(token) if index else _text(token)
    return text


def lay_out(
    head: str, tokens: Sequence[Token], comments: Mapping[int, Sequence[Token]], column: int, width: int
) -> list[str]:
    """The lines of a statement, at most `width` characters wide if possible.

    Clauses that do not fit go to a new line. Long brackets break after a comma.

    Args:
        head: The beginning of the first line.
        tokens: The tokens that follow it.
        comments: By the index of a token: the comments after it. Each ends its line.
        column: The number of spaces before clauses on a new line.
        width: The width.
    """
    writer = _Writer(head, column, width)
    for index in range(len(tokens)):
        writer.put(tokens, index)
        for comment in comments.get(index, ()):
            writer.comment(comment)
    return [line.rstrip() for line in writer.lines]


class _Writer:
    """Appends tokens and comments to the lines of a statement."""

    def __init__(self, head: str, column: int, width: int) -> None:
        self.lines = [head]
        self.column = column
        self.width = width
        self.brackets: list[int] = []  # the number of characters up to the inside of each open bracket
        self.fresh = True  # whether the last line has no tokens of the statement yet
        self.broken = False  # whether a comment ended the last line

    def put(self, tokens: Sequence[Token], index: int) -> None:
        """Append token `index` of the statement, on a new line if it may break before it and does not fit."""
        token = tokens[index]
        space = _space(tokens[index - 1], token) if index and not self.fresh else ""
        needed = len(self.lines[-1]) + len(space) + _reach(tokens, index, bool(self.brackets))
        may_break = (
            tokens[index - 1].type == "COMMA" if self.brackets else token.type in CONTINUES
        ) and not self.fresh
        if self.broken or (may_break and needed > self.width):
            self._new_line()
            space = ""
        self.lines[-1] += space + _text(token)
        self.fresh = self.broken = False
        if token.type in _OPENERS:
            self.brackets.append(len(self.lines[-1]) + (token.type == "LBRACE"))
        elif token.type in _CLOSERS and self.brackets:  # the closing brace of a phase has no opener here
            self.brackets.pop()

    def comment(self, comment: Token) -> None:
        """Append a comment, on a new line if it has one in the source or follows another comment."""
        text = comment.text.rstrip()
        if comment.leads or self.broken:
            self._new_line()
            self.lines[-1] += text
        else:
            self.lines[-1] += f"  {text}"
        self.broken = True

    def _new_line(self) -> None:
        self.lines.append(" " * (self.brackets[-1] if self.brackets else self.column))
        self.fresh = True


def _reach(tokens: Sequence[Token], index: int, inside: bool) -> int:
    """The width of the unbreakable unit from token `index` on.

    It is the rest of a clause or, `inside` brackets, of an item with its comma or closing bracket.
    """
    end, depth = index + 1, int(tokens[index].type in _OPENERS)
    while end < len(tokens):
        token = tokens[end]
        if inside and depth == 0 and token.type in ("COMMA", *_CLOSERS):
            end += 1
            break
        if not inside and depth == 0 and token.type in CONTINUES:
            break
        depth += (token.type in _OPENERS) - (token.type in _CLOSERS)
        end += 1
    return len(flat(tokens[index:end]))


def _text(token: Token) -> str:
    """The text of a token, with one space before a unit."""
    if token.type != "QUANTITY":
        return token.text
    return " ".join(part for part in split_number(token.text) if part)


def _space(before: Token, token: Token) -> str:
    """The whitespace between two adjacent tokens on a line."""
    if token.type in ("COMMA", "RPAR", "RSQB") or before.type in ("LPAR", "LSQB"):
        return ""
    if token.type == "LPAR" or (token.type == "LSQB" and before.type != "BATCH"):
        return ""
    return " "
