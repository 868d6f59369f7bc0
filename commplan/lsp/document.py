"""A text and its lazily computed analysis."""

from __future__ import annotations

from functools import cached_property

from commplan import dsl
from commplan.diagnostics import CommplanError, Diagnostic, Span
from commplan.dsl import ast
from commplan.dsl.lexer import Token, tokenize
from commplan.lint import lint
from commplan.lint.repairs import TextOffsets
from commplan.lsp.symbols import Symbols, statements


class PlanDocument:
    r"""One version of a plan. All properties are computed once, when they are first read.

    Args:
        text: the text, which may have errors.
        file: its name, for diagnostics and relative paths.

    >>> document = PlanDocument("plan p\naxis data = 2\n")
    >>> document.diagnostics, document.symbols.at(2, 6).symbol.kind
    ((), 'axis')
    """

    def __init__(self, text: str, file: str = "<plan>") -> None:
        self.text = text
        self.file = file

    @cached_property
    def analysis(self) -> dsl.Analysis:
        """The syntax tree, the errors, and the plan if there are none."""
        return dsl.analyze(self.text, self.file)

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All errors, or the warnings if there are no errors."""
        try:
            return self.analysis.diagnostics or lint(self.analysis)
        except CommplanError as error:  # raised for the plan's topology
            return error.diagnostics

    @cached_property
    def symbols(self) -> Symbols:
        """The declarations and values with their uses."""
        return Symbols(self.analysis.tree, self.analysis.values)

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """All tokens, including comments."""
        return tuple(tokenize(self.text.removeprefix("\ufeff")))

    @cached_property
    def offsets(self) -> TextOffsets:
        """The conversion between offsets and locations."""
        return TextOffsets(self.text)

    def token_at(self, line: int, column: int) -> Token | None:
        """The token at a location, or ending there; a word is preferred over an adjacent token."""
        near = [
            token for token in self.tokens
            if token.line == line and token.column <= column <= token.end_column
        ]  # fmt: skip
        return next((token for token in near if token.is_word), near[0] if near else None)

    def statement_at(self, line: int) -> ast.SyntaxNode | None:
        """The innermost declaration or statement on a line; None if there is none."""
        enclosing = [node for node in statements(self.analysis.tree) if _on(node.span, line)]
        return enclosing[-1] if enclosing else None


def _on(span: Span, line: int) -> bool:
    return span.line <= line <= span.end_line
