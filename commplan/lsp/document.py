"""A text with all that is known of it."""

from __future__ import annotations

from functools import cached_property

from commplan import dsl
from commplan.diagnostics import CommplanError, Diagnostic, Span
from commplan.dsl import ast
from commplan.dsl.lexer import Token, tokenize
from commplan.lint import lint
from commplan.lint.repairs import Places
from commplan.lsp.symbols import Symbols, statements


class Document:
    """One version of a plan; what is asked for is worked out once.

    >>> document = Document("plan p\\naxis data = 2\\n")
    >>> document.diagnostics, document.symbols.at(2, 6).symbol.kind
    ((), 'axis')
    """

    def __init__(self, text: str, file: str = "<plan>") -> None:
        self.text = text
        self.file = file

    @cached_property
    def analysis(self) -> dsl.Analysis:
        return dsl.analyse(self.text, self.file)

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All errors, or of a plan without any its warnings."""
        try:
            return self.analysis.diagnostics or lint(self.analysis)
        except CommplanError as error:  # of the topology that the plan declares
            return error.diagnostics

    @cached_property
    def symbols(self) -> Symbols:
        return Symbols(self.analysis.tree, self.analysis.values)

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """Every token, comments included."""
        return tuple(tokenize(self.text.removeprefix("\ufeff")))

    @cached_property
    def places(self) -> Places:
        return Places(self.text)

    def token_at(self, line: int, column: int) -> Token | None:
        """The token that stands at a place, or ends there; of two that meet there a word."""
        near = [
            token for token in self.tokens
            if token.line == line and token.column <= column <= token.end_column
        ]  # fmt: skip
        return next((token for token in near if token.is_word), near[0] if near else None)

    def statement_at(self, line: int) -> ast.SyntaxNode | None:
        """The innermost declaration or statement on a line."""
        holding = [node for node in statements(self.analysis.tree) if _on(node.span, line)]
        return holding[-1] if holding else None


def _on(span: Span, line: int) -> bool:
    return span.line <= line <= span.end_line
