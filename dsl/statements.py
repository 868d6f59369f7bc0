"""Groups tokens into statements and phases: newlines, brackets and recovery from errors.

A newline ends a statement except inside ( ), [ ] or option braces, or before one of CONTINUES. Brackets are
matched here. An unclosed one is reported at its position, and the next statement, declaration or phase header
is read as if it had been closed. `parser` and `format` read the resulting events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from commplan.diagnostics import Diagnostic, Note, near_names
from commplan.dsl.lexer import CLAUSES, DECLARES, HEADS, PUNCTUATION, VERBS, Token

# The types of tokens before which a statement continues on a new line.
CONTINUES = CLAUSES | {"LBRACE"}

_CLOSER = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}  # by type of the opening bracket
_CLOSERS = frozenset(_CLOSER.values())
_TEXT = {name: text for text, name in PUNCTUATION.items()}  # the text of punctuation by type
_DANGLES = frozenset({"EQUAL", "COLON", "COMMA", "ARROW"})  # a line cannot end with these
_DEEPEST = 32  # maximum number of open brackets
_LONGEST = 200_000  # maximum number of tokens of a statement; a batch size for each of 65,536 members fits
_TARGETS = 64  # the lookahead, in names, to decide whether a line begins `a, b = map`


class Statement(NamedTuple):
    """One statement.

    Attributes:
        tokens: Its tokens, at least one.
        bad: Whether an error in it was already reported.
        outer: Whether it is a declaration inside an unclosed phase.
        line_end: The number of tokens before the newline that should have ended the statement, if the
            statement evidently continues after it; else None.
    """

    tokens: tuple[Token, ...]
    bad: bool = False
    outer: bool = False
    line_end: int | None = None


class PhaseOpen(NamedTuple):
    """The beginning of a phase.

    Attributes:
        tokens: The tokens of the header, before `{`; may be empty if there is a brace.
        brace: The `{`; None if it is missing. The phase is still parsed.
        bad: Whether an error in the header was already reported.
        line_end: As in `Statement`.
    """

    tokens: tuple[Token, ...]
    brace: Token | None
    bad: bool = False
    line_end: int | None = None


class PhaseClose(NamedTuple):
    """The end of a phase. `brace` is None if the parser assumes that the phase ended."""

    brace: Token | None


Event = Statement | PhaseOpen | PhaseClose
Report = Callable[[Diagnostic], None]  # receives errors; may raise `GiveUp`


class GiveUp(Exception):  # noqa: N818  (it leaves neither parser nor checker)
    """Stops reading the file after the reason was reported."""


class _Ahead:
    """A stream of tokens with lookahead."""

    def __init__(self, tokens: Iterator[Token]) -> None:
        self._tokens = tokens
        self._ready: deque[Token] = deque()

    def peek(self, distance: int = 0) -> Token | None:
        """The token `distance` after the next one, without consuming it; None after the end."""
        while len(self._ready) <= distance:
            token = next(self._tokens, None)
            if token is None:
                return None
            self._ready.append(token)
        return self._ready[distance]

    def next(self) -> Token:
        """Consume the next token, which must exist."""
        token = self.peek()
        assert token is not None
        return self._ready.popleft()


def split(tokens: Iterator[Token], report: Report) -> Iterator[Event]:
    """Split the tokens of a file into statements and phases.

    Args:
        tokens: The tokens, without comments. They are read lazily.
        report: Receives the errors of newlines and brackets.

    Yields:
        The events in order. Each `PhaseOpen` has a `PhaseClose` before the next one and before the end.

    Raises:
        GiveUp: After reporting CP0013 for brackets that are nested too deep or a statement that is too long,
            and if `report` raises it.
    """
    return _Splitter(tokens, report).events()


def begins_assignment(tokens: Sequence[Token]) -> bool:
    """Whether the tokens begin with `NAMES =`, well formed or nearly so."""
    for token in tokens:
        if token.type == "EQUAL":
            return token is not tokens[0] and tokens[0].type not in DECLARES
        if token.type != "COMMA" and not token.is_word:
            return False
    return False


class _Splitter:
    """The state of `split`."""

    def __init__(self, tokens: Iterator[Token], report: Report) -> None:
        self.ahead = _Ahead(tokens)
        self.report = report
        self.phase: PhaseOpen | None = None  # the open phase
        self.phase_reported = False  # whether the missing brace of the phase was reported
        self.forgiven = 0  # closing braces to ignore because their phase was already reported
        self.outside = False  # whether inside a run of stages outside a phase

    def events(self) -> Iterator[Event]:
        """Yield the statements and phases of the file."""
        while (token := self.ahead.peek()) is not None:
            if token.type == "RBRACE":
                yield from self._close(self.ahead.next())
                continue
            outer = False
            if self.phase is not None and token.type in HEADS | DECLARES:
                self._phase_is_open(token)
                outer = token.type in DECLARES
                if not outer:
                    self.phase = None
                    self.forgiven += 1
                    yield PhaseClose(None)
            event = self._collect(outer)
            if isinstance(event, PhaseOpen):
                if self.phase is not None:  # a declaration with a brace, in a phase without one
                    self.forgiven += self.phase.brace is not None
                    yield PhaseClose(None)
                self.phase, self.phase_reported = event, event.brace is None
            self._note_outside(event)
            yield event
        if self.phase is not None:
            self._phase_is_open(None)
            yield PhaseClose(None)

    def _note_outside(self, event: Statement | PhaseOpen) -> None:
        """Count a run of stages after the end of a phase, since a `}` to ignore probably follows it."""
        tokens = event.tokens
        is_assignment = begins_assignment(tokens) and tokens[1].type in ("COMMA", "EQUAL")
        is_stage = isinstance(event, Statement) and (tokens[0].type == "OUTPUT" or is_assignment)
        outside = self.phase is None and is_stage
        if outside and not self.outside:
            self.forgiven += 1
        self.outside = outside

    def _close(self, brace: Token) -> Iterator[Event]:
        """End the phase at a `}` that belongs to no statement, or report it."""
        if self.phase is not None:
            self.phase = None
            yield PhaseClose(brace)
        elif self.forgiven:
            self.forgiven -= 1
        else:
            self._stray(brace)

    def _phase_is_open(self, before: Token | None) -> None:
        """Report once that the phase is not closed before the token `before`, or the end of the file."""
        assert self.phase is not None
        if not self.phase_reported and self.phase.brace is not None:
            self._report_unclosed(self.phase.brace, before)
        self.phase_reported = True

    def _collect(self, outer: bool) -> Statement | PhaseOpen:
        """Collect the tokens up to the end of the statement, and match its brackets.

        `outer` is whether a declaration in an open phase follows, which the phase does not contain.
        """
        tokens: list[Token] = []
        open_: list[Token] = []  # the open brackets
        bad = False
        line_end: int | None = None
        assignment: bool | None = None  # computed at the first brace that needs it
        inside = self.phase is not None and not outer
        while (token := self.ahead.peek()) is not None:
            # A newline before the token may end the statement.
            if tokens and token.leads:
                if not open_ and token.type not in CONTINUES:
                    if self._ends(tokens, token):
                        break
                    line_end = len(tokens) if line_end is None else line_end
                if open_ and self._begins(token):
                    if not bad:
                        self._report_unclosed(open_[-1], token)
                    return self._done(Statement(tuple(tokens), True, outer))
            # Outside phases, a brace after anything but an assignment opens a phase.
            if token.type == "LBRACE" and not open_ and not inside:
                assignment = begins_assignment(tokens) if assignment is None else assignment
                if not assignment:
                    return PhaseOpen(tuple(tokens), self.ahead.next(), bad, line_end)
            # Match brackets. A closing brace may end the phase, and so the statement.
            if token.type in _CLOSER:
                open_.append(token)
                self._guard(token, len(open_) > _DEEPEST, "brackets are nested too deep")
            elif token.type in _CLOSERS:
                if token.type == "RBRACE" and not open_ and not self._ends_options(token, tokens):
                    break
                if token.type == "RBRACE" and open_ and self._closes_phase(token, open_, bad):
                    bad = True
                    break
                bad = not self._match(token, open_, bad) or bad
            tokens.append(self.ahead.next())
            self._guard(token, len(tokens) > _LONGEST, "the statement is too long")
        if open_:
            if not bad:
                self._report_unclosed(open_[-1], self.ahead.peek())
            bad = True
            self.phase_reported = True  # the end of the file would report the same mistake
        return self._done(Statement(tuple(tokens), bad, outer, line_end))

    def _done(self, statement: Statement) -> Statement | PhaseOpen:
        """The event of a complete statement; outside phases, a header without `{` begins a phase."""
        if statement.tokens[0].type in HEADS and self.phase is None:
            return PhaseOpen(statement.tokens, None, statement.bad, statement.line_end)
        return statement

    def _ends(self, tokens: list[Token], token: Token) -> bool:
        """Whether `token` on a new line begins something new.

        If not, the newline is a mistake, since it ends the statement. After `,` or `=`, or before the `batch`
        of a load, the following tokens belong to the same mistake and are not reported again.
        """
        if token.type == "RBRACE" or self._begins(token):
            return True
        if token.type == "BATCH":
            after = self.ahead.peek(1)
            has_size = after is not None and after.type in ("INT", "LSQB")
            return not (has_size and any(before.type == "LOAD" for before in tokens))
        if tokens[0].type in HEADS and self.phase is None:
            after = self.ahead.peek(1)
            return after is None or after.type != "LBRACE"  # `phase` and its name are on two lines
        return tokens[-1].type not in _DANGLES

    def _begins(self, token: Token) -> bool:
        """Whether the next token certainly begins a statement, a declaration or a phase header."""
        if token.type in DECLARES or token.type in HEADS or token.type == "OUTPUT":
            return True
        for distance in range(0, 2 * _TARGETS, 2):
            name = self.ahead.peek(distance)
            mark = self.ahead.peek(distance + 1)
            if name is None or mark is None or not name.is_word or mark.leads:
                return False
            if mark.type == "EQUAL":
                return self._is_verb(self.ahead.peek(distance + 2), self.ahead.peek(distance + 3))
            if mark.type != "COMMA":
                return False
        return False

    def _is_verb(self, word: Token | None, after: Token | None) -> bool:
        """Whether a stage begins at `word`: a verb, or a misspelled verb with an operand after it."""
        if word is None or word.leads:
            return False
        if word.type in VERBS:
            return True
        has_operand = after is not None and after.is_word and not after.leads
        return has_operand and bool(near_names(word.text, sorted(verb.lower() for verb in VERBS)))

    def _match(self, closer: Token, open_: list[Token], bad: bool) -> bool:
        """Close the bracket that `closer` matches, and the brackets inside it.

        Returns whether it is the innermost one. Otherwise reports an error, unless `bad`.
        """
        if not open_:
            if not bad:
                self._stray(closer)
            return False
        if _CLOSER[open_[-1].type] == closer.type:
            open_.pop()
            return True
        if not bad:
            self._report_unclosed(open_[-1], closer)
        if any(_CLOSER[token.type] == closer.type for token in open_):
            while _CLOSER[open_[-1].type] != closer.type:
                open_.pop()
        open_.pop()
        return False

    def _ends_options(self, brace: Token, tokens: list[Token]) -> bool:
        """Whether `}` closes options whose `{` is missing, rather than the phase.

        It does if it follows a `NAME = VALUE` on its line that is no stage, in a phase that began on an
        earlier line.
        """
        if self.phase is None or self.phase.brace is None or brace.leads:
            return False
        if self.phase.brace.line == tokens[0].line:
            return False
        depth = 0
        for index, token in enumerate(tokens):
            depth += (token.type in _CLOSER) - (token.type in _CLOSERS)
            if token.type == "EQUAL" and depth == 0 and token.line == brace.line:
                value, after = tokens[index + 1 : index + 2], tokens[index + 2 : index + 3]
                if value and value[0].type not in VERBS and (not after or after[0].type == "COMMA"):
                    return True
        return False

    def _closes_phase(self, brace: Token, open_: list[Token], bad: bool) -> bool:
        """Whether `}` ends the phase although brackets of the statement are open.

        It does if the statement opened no brace. If it did, the `}` must be indented no deeper than the phase
        header, and be the last one before the next phase or declaration. The open brackets are then closed,
        and reported unless `bad`.
        """
        if any(token.type == "LBRACE" for token in open_):
            after = self.ahead.peek(1)
            last = after is None or after.type in HEADS or after.type in DECLARES
            if self.phase is None or not brace.leads or not last:
                return False
            header = self.phase.tokens[0] if self.phase.tokens else self.phase.brace
            if header is None or brace.column > header.column:
                return False
        if not bad:
            self._report_unclosed(open_[-1], brace)
        open_.clear()
        return True

    def _report_unclosed(self, opener: Token, before: Token | None) -> None:
        """Report CP0006: `opener` is not closed before the token `before`, or the end of the file."""
        closer = _TEXT[_CLOSER[opener.type]]
        if before is None:
            note = Note("the file ends before that")
        elif before.type in _CLOSERS:
            note = Note(f"this `{before.text}` comes first", before.span)
        else:
            note = Note(f"`{before.text}` begins something new here", before.span)
        message = f"`{opener.text}` is never closed: expected `{closer}`"
        self.report(Diagnostic("CP0006", message, opener.span, (note,)))

    def _stray(self, closer: Token) -> None:
        """Report CP0007: `closer` closes nothing."""
        self.report(Diagnostic("CP0007", f"`{closer.text}` closes nothing", closer.span))

    def _guard(self, token: Token, too_much: bool, why: str) -> None:
        """Report CP0013 with the reason `why` and stop reading, if `too_much`."""
        if too_much:
            self.report(Diagnostic("CP0013", f"{why}; the rest of the file is not read", token.span))
            raise GiveUp
