"""What is said of a place: of a name its placement, of a word what it means, of a stage what it became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.highlight.categories import Category, categorise
from commplan.lsp import documentation
from commplan.lsp.document import Document
from commplan.lsp.symbols import Use

_NAMES = (Category.NAME, Category.FUNCTION)


def hover(
    document: Document, line: int, column: int, stages: Mapping[int, Sequence[str]] | None = None
) -> tuple[str, Span] | None:
    """Markdown about the place, and the place that it is about; None where there is nothing to say.

    stages: what the compiler makes of the stage on each line, where that is known.
    """
    use = document.symbols.at(line, column)
    node = document.statement_at(line)
    if use is not None and use.symbol is not None:
        parts, span = [_name(document, use)], use.span
    else:
        token = document.token_at(line, column)
        category = next((kind for other, kind in categorise(document.text) if other == token), None)
        text = documentation.of_word(token.text) if token and category not in _NAMES else None
        if token is None or text is None:
            return None
        parts, span = [text], token.span
    if isinstance(node, ast.StageStmt):
        became = (stages or {}).get(node.span.line, ())
        parts += [f"---\n```text\n{chr(10).join(became)}\n```"] if became else []
    return "\n\n".join(parts), span


def _name(document: Document, use: Use) -> str:
    """The declaration of a name, or the type and placement of the value that it is here."""
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


def _source(document: Document, span: Span) -> str:
    """What is written at a place, on one line."""
    start, end = document.places.range(span)
    lines = (line.partition("#")[0].strip() for line in document.text[start:end].splitlines())
    return " ".join(lines)
