"""Parses text into the untyped tree, and reports all syntax errors in one run, as diagnostics.

`statements` splits the text into statements, `grammar` parses each of them, and `syntax_errors` has the
diagnostics. A mistake affects one statement only. The statement becomes a `BadStmt`, which still binds the
names before its `=`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import cast

from msgspec.structs import replace

from commplan.diagnostics import Diagnostic, Note, Span
from commplan.dsl import ast
from commplan.dsl.grammar import PhaseHeader, Piece, Start, Unexpected, name_of, parse_statement
from commplan.dsl.lexer import DECLARES, HEADS, VERBS, Token, end_of, tokenize
from commplan.dsl.statements import GiveUp, PhaseClose, PhaseOpen, Statement, begins_assignment, split
from commplan.dsl.syntax_errors import (
    PHASES,
    bad_token,
    is_declaration_like,
    unexpected,
    unknown_statement,
    unquoted,
)

MOST_ERRORS = 1000  # maximum number of errors in a file; then reading stops
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]")  # control characters except whitespace


def parse(text: str, file: str) -> tuple[ast.File, tuple[Diagnostic, ...]]:
    """Parse a `.plan` file.

    Args:
        text: The source. A byte order mark is dropped; lines may end in LF, CRLF or CR.
        file: The file name to show in diagnostics.

    Returns:
        The whole tree, with a `BadStmt` for each statement that did not parse, and the diagnostics sorted by
        position.
    """
    return _PlanParser(text.removeprefix("\ufeff"), file).run()


class _PlanParser:
    """The state of `parse` for one file."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.diagnostics: list[Diagnostic] = []
        self.name: ast.Name | None = None  # of the plan
        self.header_seen = False  # whether there was a `plan` statement, also a wrong one
        self.items: list[ast.Decl] = []
        self.outside = False  # whether in a run of stages outside a phase, which is reported once
        self.first: Token | None = None  # the first token of the file
        self.names_taken: set[str] = set()  # messages of reported keywords that were used as names

    def run(self) -> tuple[ast.File, tuple[Diagnostic, ...]]:
        """Parse the file."""
        control = _CONTROL.search(self.text)
        if control:
            self._report(_not_text(self.text, control.start()))
        else:
            with suppress(GiveUp):
                self._read()
                self._check_header()
        end = end_of(self.text)
        span = Span(1, 1, *end)
        items = tuple(self.items)
        tree = ast.File(span=span, file=self.file, text=self.text, name=self.name, items=items)
        return tree, tuple(sorted(self.diagnostics, key=_place))

    def _report(self, diagnostic: Diagnostic) -> None:
        """Add an error. Raises `GiveUp` if there are `MOST_ERRORS` already, after adding CP0013."""
        if len(self.diagnostics) >= MOST_ERRORS:
            message = f"more than {MOST_ERRORS} errors; the rest of the file is not read"
            self.diagnostics.append(Diagnostic("CP0013", message, diagnostic.span, file=self.file))
            raise GiveUp
        self.diagnostics.append(replace(diagnostic, file=self.file))

    def _error(self, code: str, message: str, span: Span, *notes: Note) -> None:
        self._report(Diagnostic(code, message, span, notes))

    def _tokens(self) -> Iterator[Token]:
        """The tokens without comments."""
        for token in tokenize(self.text):
            if token.type != "COMMENT":
                self.first = self.first or token
                yield token

    def _read(self) -> None:
        """Parse all statements."""
        events = split(self._tokens(), self._report)
        for event in events:
            match event:
                case PhaseOpen():
                    self._phase(event, events)
                case Statement():
                    self._top(event)
                case PhaseClose():
                    pass

    def _top(self, statement: Statement) -> None:
        """Parse a statement outside the phases."""
        tokens = statement.tokens
        first = tokens[0].type
        if first == "PLAN":
            self._header(statement)
            return
        if first in DECLARES:
            self.outside = False
            names = _declared_names(tokens)
            node = self._parse("declaration", statement)
            self.items.append(
                cast(ast.Decl, node) if node else ast.BadStmt(span=ast.span_of(tokens), targets=names)
            )
            return
        targets = _targets(tokens)
        self.items.append(ast.BadStmt(span=ast.span_of(tokens), targets=targets))
        if statement.bad or self._bad_token(tokens) or self.outside:
            return
        if first == "OUTPUT" or (targets and not is_declaration_like(tokens)):
            self.outside = True
            subject = "a stage" if targets else "`output`"
            self._error("CP0012", f"{subject} must be inside a phase", ast.span_of(tokens), Note(PHASES))
            return
        self._report(unknown_statement(tokens, inside=False))

    def _header(self, statement: Statement) -> None:
        """Parse a `plan NAME` statement. Reports CP0005 if it is not the first statement of the file."""
        node = self._parse("header", statement)
        if self.header_seen:
            if node:
                self._error("CP0005", "`plan NAME` is written once in a file", ast.span_of(statement.tokens))
            return
        self.header_seen = True
        if self.items and node:
            self._error("CP0005", "`plan NAME` must be the first statement", ast.span_of(statement.tokens))
        if isinstance(node, ast.Name):
            self.name = node

    def _check_header(self) -> None:
        """Report CP0005 if the file has no `plan` statement."""
        if self.header_seen:
            return
        if self.first is None:
            message, span = "a plan begins with `plan NAME`: the file is empty", Span(1, 1, 1, 2)
        else:
            message = f"a plan begins with `plan NAME`, found `{self.first.text[:40]}`"
            span = self.first.span
        if any(diagnostic.span == span for diagnostic in self.diagnostics):
            return  # another error is reported at this place, such as `pln x`
        self.diagnostics.append(Diagnostic("CP0005", message, span, file=self.file))

    def _phase(self, opened: PhaseOpen, events: Iterator[object]) -> None:
        """Parse a phase, whose statements are the next of `events`."""
        self.outside = False
        header = self._phase_header(opened)
        body: list[ast.StageStmt | ast.OutputStmt | ast.BadStmt] = []
        index = len(self.items)
        end: Token | None = None
        try:
            for event in events:
                if isinstance(event, PhaseClose):
                    end = event.brace
                    break
                assert isinstance(event, Statement)
                if event.outer:
                    self._top(event)
                else:
                    body.append(self._inside(event))
        finally:  # keep the phase as far as it was read if reading is aborted
            self.items.insert(index, _phase_item(opened, header, body, end))

    def _phase_header(self, opened: PhaseOpen) -> PhaseHeader | None:
        """Parse a phase header, and report errors in it. None if its meaning cannot be guessed."""
        tokens = opened.tokens
        if not tokens:
            assert opened.brace is not None
            self._error("CP0009", "expected a phase before `{`, such as `each step`", opened.brace.span)
            return None
        if tokens[0].type not in HEADS:
            self._not_a_phase(opened)
            return None
        node = self._parse("phase", Statement(tokens, opened.bad, line_end=opened.line_end))
        if node is None:
            return _guess_header(tokens)
        if opened.brace is None or opened.line_end is not None:
            last = tokens[: opened.line_end][-1]
            span = Span(last.line, last.end_column, last.line, last.end_column + 1)
            self._error("CP0009", "expected `{`, found the end of the line", span)
        return cast(PhaseHeader, node)

    def _not_a_phase(self, opened: PhaseOpen) -> None:
        """Report a `{` after tokens that are not a phase header."""
        tokens = opened.tokens
        if opened.bad or self._bad_token(tokens):
            return
        if tokens[0].type in DECLARES and opened.brace is not None:
            start: Start = "header" if tokens[0].type == "PLAN" else "declaration"
            node = self._parse(start, Statement((*tokens, opened.brace)))
            assert node is None  # no declaration contains a brace: this reports an error at the brace
            self.header_seen = self.header_seen or start == "header"
            return
        self._report(unknown_statement(tokens, inside=False))

    def _inside(self, statement: Statement) -> ast.StageStmt | ast.OutputStmt | ast.BadStmt:
        """Parse a statement inside a phase."""
        tokens = statement.tokens
        bad = ast.BadStmt(span=ast.span_of(tokens), targets=_targets(tokens))
        if tokens[0].type == "OUTPUT" or begins_assignment(tokens):
            node = self._parse("statement", statement)
            return cast(ast.StageStmt | ast.OutputStmt, node) if node else bad
        if not statement.bad and not self._bad_token(tokens):
            self._report(unknown_statement(tokens, inside=True))
        return bad

    def _parse(self, start: Start, statement: Statement) -> Piece | None:
        """Parse a statement, or return None after reporting an error."""
        if statement.bad or self._bad_token(statement.tokens):
            return None
        tokens = statement.tokens[: statement.line_end]
        try:
            return parse_statement(start, tokens)
        except Unexpected as error:
            mistake = unexpected(start, tokens, error)
            # A keyword used as a name is reported once, however often the name occurs.
            is_repeated = mistake.code == "CP0010" and mistake.message in self.names_taken
            self.names_taken.add(mistake.message)
            if not is_repeated:
                self._report(mistake)
            return None

    def _bad_token(self, tokens: Sequence[Token]) -> bool:
        """Report the first invalid token, if any, and return whether there is one."""
        bad = next((token for token in tokens if token.type == "BAD"), None)
        if bad:
            self._report(unquoted(tokens) if tokens[0].type == "TOPOLOGY" else bad_token(bad))
        return bad is not None


def _phase_item(
    opened: PhaseOpen,
    header: PhaseHeader | None,
    body: Sequence[ast.StageStmt | ast.OutputStmt | ast.BadStmt],
    end: Token | None,
) -> ast.PhaseDecl | ast.BadStmt:
    """The node of a phase; without a `header`, a `BadStmt` that binds the names of its body.

    `end` is the `}`, or None if it is missing.
    """
    tokens = opened.tokens or cast(tuple[Token, ...], (opened.brace,))
    words = ast.span_of(tokens)
    last = end.span if end else body[-1].span if body else opened.brace.span if opened.brace else words
    span = words.to(last)
    if header is None:
        targets = tuple(
            name for stmt in body if not isinstance(stmt, ast.OutputStmt) for name in stmt.targets
        )
        return ast.BadStmt(span=span, targets=targets)
    return ast.PhaseDecl(
        span=span,
        kind=header.kind,
        header=words,
        body=tuple(body),
        period=header.period,
        name=header.name,
        fragments=header.fragments,
        hidden=header.hidden,
    )


def _guess_header(tokens: Sequence[Token]) -> PhaseHeader | None:
    """The most likely meaning of a wrong phase header, so that its body can be checked; None if unclear."""
    match tokens[0].type:
        case "AT":
            return PhaseHeader("start")
        case "EACH":
            return PhaseHeader("step")
        case "EVERY" if len(tokens) > 1 and tokens[1].type == "INT":
            number = ast.Number(span=tokens[1].span, text=tokens[1].text, value=int(tokens[1].text))
            return PhaseHeader("every", number)
        case "PHASE" if len(tokens) > 1 and tokens[1].is_word:
            return PhaseHeader("named", name=name_of(tokens[1]))
        case _:
            return None


def _targets(tokens: Sequence[Token]) -> tuple[ast.Name, ...]:
    """The names before the `=` of an assignment.

    If two statements have run together, the names before a later `=` that precedes a stage are included.
    """
    if not begins_assignment(tokens):
        return ()
    first = next(index for index, token in enumerate(tokens) if token.type == "EQUAL")
    names = [name_of(token) for token in tokens[:first] if token.is_word]
    for index in range(first + 1, len(tokens) - 1):
        if tokens[index].type == "EQUAL" and tokens[index + 1].type in VERBS:
            names += _names_before(tokens, index)
    return tuple(names)


def _names_before(tokens: Sequence[Token], index: int) -> list[ast.Name]:
    """The names of `a, b` before the token at `index`."""
    start = index - 1
    while start >= 2 and tokens[start - 1].type == "COMMA" and tokens[start - 2].is_word:
        start -= 2
    return [name_of(token) for token in tokens[max(start, 0) : index] if token.is_word]


def _declared_names(tokens: Sequence[Token]) -> tuple[ast.Name, ...]:
    """The name after each declaration keyword; there are several if lines have run together."""
    return tuple(
        name_of(after)
        for word, after in pairwise(tokens)
        if word.type in DECLARES and after.is_word and after.type not in DECLARES
    )


def _place(diagnostic: Diagnostic) -> tuple[int, int]:
    return (diagnostic.span.line, diagnostic.span.column) if diagnostic.span else (0, 0)


def _not_text(text: str, offset: int) -> Diagnostic:
    """The error CP0002 for the control character at `offset`."""
    line, column = end_of(text[:offset])
    message = f"this is not a text file: found the control character U+{ord(text[offset]):04X}"
    notes = (Note("a plan is text in UTF-8"),)
    return Diagnostic("CP0002", message, Span(line, column, line, column + 1), notes)
