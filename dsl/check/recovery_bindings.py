"""The names that statements with syntax errors would declare or bind.

A wrong guess hides at most one error until the next run. Without guesses, correct uses of a name would be
reported because its declaration did not parse.
"""

from __future__ import annotations

import re

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.dsl.lexer import KEYWORDS, VERBS

_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NAMES = re.compile(r"\s*[A-Za-z_]\w*(\s*,\s*[A-Za-z_]\w*)*\s*", re.ASCII)  # names separated by commas
_DECLARED = re.compile(r"[=:({\[]|->")  # the end of the name of a declaration
_ASSIGNED = re.compile(rf"=|\b(?:{'|'.join(sorted(VERBS)).lower()})\b")  # the end of the names of a stage
_LINE_END = re.compile(r"\r\n|\r|\n")


class RecoveryBindings:
    """Looks up the names in statements that did not parse. `text` is the source of the plan."""

    def __init__(self, text: str) -> None:
        self._lines = _LINE_END.split(text)

    def declared(self, statement: ast.BadStmt) -> list[str]:
        """The names that a statement outside a phase would declare.

        May also contain other words before the name, such as a misspelled keyword.
        """
        if statement.targets:
            return [name.text for name in statement.targets]
        head = _DECLARED.split(self._text(statement.span), maxsplit=1)[0]
        return [word for word in _WORD.findall(head) if word not in KEYWORDS]

    def targets(self, statement: ast.BadStmt) -> tuple[list[str], bool]:
        """The names that a statement in a phase would bind, and whether the list is complete.

        May contain a name twice.
        """
        head, *assigned = _ASSIGNED.split(self._text(statement.span), maxsplit=1)
        if not assigned:
            return [], True  # not an assignment, for example a misspelled `output`
        names = [name.text for name in statement.targets]
        names += [word for word in _WORD.findall(head) if word not in KEYWORDS]
        return names, _NAMES.fullmatch(head) is not None

    def words(self, statement: ast.BadStmt) -> frozenset[str]:
        """All words of the statement, including keywords."""
        return frozenset(_WORD.findall(self._text(statement.span)))

    def _text(self, span: Span) -> str:
        """The source text at a location, without comments."""
        lines = self._lines[max(span.line - 1, 0) : span.end_line]
        if not lines:
            return ""
        if len(lines) == span.end_line - span.line + 1:
            lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
        return "\n".join(line.partition("#")[0] for line in lines)
