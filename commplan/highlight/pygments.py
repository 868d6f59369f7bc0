"""The Pygments lexer for ```` ```plan ```` blocks in Sphinx, MkDocs and other tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pygments.lexer import Lexer
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Text

from commplan.dsl.lexer import split_number
from commplan.highlight.categories import Category, categorize

_TYPES: dict[Category, Any] = {  # token types of Pygments
    Category.COMMENT: Comment.Single,
    Category.DECLARATION: Keyword.Declaration,
    Category.PHASE: Keyword.Namespace,
    Category.VERB: Keyword,
    Category.CLAUSE: Operator.Word,
    Category.TYPE: Keyword.Type,
    Category.CONSTANT: Keyword.Constant,
    Category.FUNCTION: Name.Function,
    Category.ALGORITHM: Name.Builtin,
    Category.OPERATOR: Name.Builtin,
    Category.OPTION: Name.Attribute,
    Category.NUMBER: Number,
    Category.TEXT: String,
    Category.UNIT: Number.Unit,
    Category.MARK: Operator,
    Category.PUNCTUATION: Punctuation,
    Category.NAME: Name,
    Category.BAD: Error,
}


class PlanLexer(Lexer):
    """Tokenizes a `.plan` file with commplan's lexer.

    >>> from pygments.token import Keyword
    >>> tokens = PlanLexer().get_tokens("y = reduce x over data by sum")
    >>> [text for kind, text in tokens if kind is Keyword]
    ['reduce']
    """

    name = "commplan plan"
    aliases = ("plan", "commplan")
    filenames = ("*.plan",)

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        """Yield (offset, type, text) of every piece of `text`, including whitespace, without gaps."""
        end = 0
        for start, token, category in _placed(text):
            if start > end:
                yield end, Text.Whitespace, text[end:start]
            end = start + len(token)
            if category is not Category.NUMBER:
                yield start, _TYPES[category], token
                continue
            digits, unit = split_number(token)
            blank = len(token) - len(digits) - len(unit or "")
            yield start, _TYPES[category], digits
            if blank:
                yield start + len(digits), Text.Whitespace, token[len(digits) : len(digits) + blank]
            if unit:
                yield start + len(digits) + blank, _TYPES[Category.UNIT], unit
        if end < len(text):
            yield end, Text.Whitespace, text[end:]


def _placed(text: str) -> Iterator[tuple[int, str, Category]]:
    """The offset in `text`, the text and the category of every token, in order."""
    lines = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text))]
    for token, category in categorize(text):
        yield lines[token.line - 1] + token.column - 1, token.text, category
