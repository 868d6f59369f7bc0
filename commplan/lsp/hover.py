"""Hovers: placements of names, documentation of words, and compiled stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.highlight.categories import Category, categorize
from commplan.lsp import documentation
from commplan.lsp.document import PlanDocument
from commplan.lsp.symbols import Use

_NAMES = (Category.NAME, Category.FUNCTION)  # tokens that are no words of the language, except for built-ins


def hover(
    document: PlanDocument, line: int, column: int, stages: Mapping[int, Sequence[str]] | None = None
) -> tuple[str, Span] | None:
    """Describe a location.

    Args:
        document: the document.
        line: line number, from 1.
        column: column number, from 1.
        stages: descriptions of the compiled stages by line, if available.

    Returns:
        Markdown and the span that it describes; None if there is nothing to describe.
    """
    use = document.symbols.at(line, column)
    node = document.statement_at(line)
    if use is not None and use.symbol is not None:
        parts, span = [_describe(document, use)], use.span
    else:
        token = document.token_at(line, column)
        category = next((kind for other, kind in categorize(document.text) if other == token), None)
        is_builtin = (
            category is Category.FUNCTION and token is not None and token.text in documentation.FUNCTIONS
        )
        text = documentation.of_word(token.text) if token and (category not in _NAMES or is_builtin) else None
        if token is None or text is None:
            return None
        parts, span = [text], token.span
    if isinstance(node, ast.StageStmt):
        descriptions = (stages or {}).get(node.span.line, ())
        if descriptions:
            text = "\n".join(descriptions)
            parts.append(f"---\n```text\n{text}\n```")
    return "\n\n".join(parts), span


def _describe(document: PlanDocument, use: Use) -> str:
    """The declaration of a name, or the type and placement of its value."""
    symbol = use.symbol
    assert symbol is not None
    value = document.symbols.value(use.span, symbol)
    if value is None:
        return f"```plan\n{_source(document, symbol.node.span)}\n```"
    kind = documentation.KINDS[symbol.kind]
    lines = [f"```plan\n{use.name} : {value.type} {value.placement}\n```", f"{kind}, `{value.placement}`"]
    if symbol.kind == "value":
        lines.append(f"made by `{_source(document, symbol.node.span)}`")
    return "\n\n".join(lines)


def _source(document: PlanDocument, span: Span) -> str:
    """The text of a span on one line, without comments."""
    start, end = document.offsets.offsets_of(span)
    lines = (line.partition("#")[0].strip() for line in document.text[start:end].splitlines())
    return " ".join(lines)
