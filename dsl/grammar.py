"""Tokens of one statement to its node of the tree, by the LALR tables of `plan.lark`.

The tables are made once per process, when the first statement is parsed (about 20 ms).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import lark
from lark.lexer import Lexer as LarkLexer

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.dsl.lexer import SOFT, Token, number_value, split_number

Start = Literal["header", "declaration", "phase", "statement"]

_END = "$END"
_SOFT = frozenset(word.upper() for word in SOFT)


PhaseKind = Literal["start", "step", "every", "named"]
PHASE_KINDS: dict[str, PhaseKind] = {"AT": "start", "EACH": "step", "EVERY": "every", "PHASE": "named"}


class PhaseHeader(NamedTuple):
    """What stands before the `{` of a phase."""

    kind: PhaseKind
    period: ast.Number | None
    name: ast.Name | None


class Unexpected(Exception):  # noqa: N818  (it never leaves the parser)
    """The token at `index` (the end where it is past the last) cannot stand there; what could."""

    def __init__(self, index: int, accepted: frozenset[str]) -> None:
        super().__init__(index, accepted)
        self.index = index
        self.accepted = accepted


Piece = ast.Decl | ast.StageStmt | ast.OutputStmt | ast.Name | PhaseHeader


def parse_statement(start: Start, tokens: Sequence[Token]) -> Piece:
    """The node of one statement. Raises `Unexpected` at the first token that does not fit."""
    machine: Any = _parser().parse_interactive(start=start)  # pyright: ignore[reportUnknownMemberType]
    for index, token in enumerate(tokens):
        accepted = cast(dict[str, object], machine.choices())
        kind = token.type
        if kind in _SOFT and not _is_keyword(tokens, index, accepted):
            kind = "NAME"
        if kind not in accepted:
            raise Unexpected(index, _accepts(machine))
        try:
            machine.feed_token(cast(lark.Token, token if kind == token.type else token._replace(type=kind)))
        except lark.UnexpectedToken:  # a lookahead shared with another place of the grammar
            raise Unexpected(index, _accepts(machine)) from None
    try:
        return cast(Piece, machine.feed_token(lark.Token(_END, "")))
    except lark.UnexpectedToken:
        raise Unexpected(len(tokens), _accepts(machine)) from None


def _is_keyword(tokens: Sequence[Token], index: int, accepted: Iterable[str]) -> bool:
    """Whether a word that may also be a name is the word of the grammar here."""
    kind = tokens[index].type
    if kind in accepted:
        return True
    # `load batch 64`: the source is missing, it is not called `batch`.
    forgotten = kind == "BATCH" and index > 0 and tokens[index - 1].type == "LOAD"
    return forgotten and index + 1 < len(tokens) and tokens[index + 1].type in ("INT", "LSQB")


def _accepts(machine: Any) -> frozenset[str]:
    return frozenset(cast(set[str], machine.accepts()))


class _NoLexer(LarkLexer):
    """Tokens are fed by `parse_statement`."""

    def __init__(self, lexer_conf: object) -> None: ...

    def lex(self, lexer_state: object, parser_state: object) -> Any:
        raise NotImplementedError


@cache
def _parser() -> lark.Lark:
    grammar = Path(__file__).with_name("plan.lark").read_text(encoding="utf-8")
    return lark.Lark(
        grammar,
        parser="lalr",
        lexer=_NoLexer,
        start=["header", "declaration", "phase", "statement"],
        maybe_placeholders=False,
        keep_all_tokens=True,
        transformer=cast(lark.Transformer[lark.Token, Piece], _Build()),
    )


class _Clause(NamedTuple):
    """A clause on its way into its stage, and the field that it fills there."""

    field: str
    value: Any
    span: Span


class _List(NamedTuple):
    """Names, or types."""

    span: Span
    items: tuple[Any, ...]


class _Over(NamedTuple):
    """`over` or `across`, whichever was written, with its axes."""

    word: Token
    axes: _List
    span: Span


_Child = Any  # a Token, a node of the tree, a _Clause, _Over or _List; every one has a span


def _span(children: Sequence[_Child]) -> Span:
    first, last = cast(Span, children[0].span), cast(Span, children[-1].span)
    return first if len(children) == 1 else first.to(last)


def _name(token: Token) -> ast.Name:
    return ast.Name(span=token.span, text=token.text)


def _number(token: Token) -> ast.Number:
    digits, unit = split_number(token.text)
    return ast.Number(span=token.span, text=digits, value=number_value(digits), unit=unit)


def _value(child: _Child) -> ast.Name | ast.Number:
    if not isinstance(child, Token):
        return child
    return _name(child) if child.type == "NAME" else _number(child)


def _names_in(children: Sequence[_Child]) -> tuple[ast.Name, ...]:
    """The names written directly here, in order."""
    return tuple(_name(c) for c in children if isinstance(c, Token) and c.type == "NAME")


class _Build:
    """One method per rule of the grammar, called with its children as the parser reduces it."""

    def header(self, c: list[_Child]) -> ast.Name:
        """What `plan NAME` says."""
        return _name(c[1])

    def axis(self, c: list[_Child]) -> ast.AxisDecl:
        size = c[3] if isinstance(c[3], ast.Number) else None
        return ast.AxisDecl(span=_span(c), kind=c[0].text, name=_name(c[1]), size=size)

    def source(self, c: list[_Child]) -> ast.SourceDecl:
        return ast.SourceDecl(span=_span(c), name=_name(c[1]), type=c[3])

    def fn(self, c: list[_Child]) -> ast.FnDecl:
        name, *words = _names_in(c)
        *operands, results = (child.items for child in c if isinstance(child, _List))
        return ast.FnDecl(
            span=_span(c),
            name=name,
            operands=operands[0] if operands else (),
            results=results,
            where=words[0] if words else None,
            flags=tuple(words[1:]),
        )

    def input(self, c: list[_Child]) -> ast.InputDecl:
        return ast.InputDecl(span=_span(c), name=_name(c[1]), type=c[3], placement=tuple(c[4:]))

    def state(self, c: list[_Child]) -> ast.StateDecl:
        placement = tuple(child for child in c if isinstance(child, ast.PlacementItem))
        server = _name(c[-1]) if isinstance(c[-1], Token) else None
        return ast.StateDecl(span=_span(c), name=_name(c[1]), type=c[3], placement=placement, server=server)

    def type(self, c: list[_Child]) -> ast.TypeExpr:
        dims = tuple(child for child in c if isinstance(child, ast.Number))
        return ast.TypeExpr(span=_span(c), name=_name(c[0]), dims=dims if len(c) > 1 else None)

    def types(self, c: list[_Child]) -> _List:
        return _List(_span(c), tuple(child for child in c if isinstance(child, ast.TypeExpr)))

    def placement(self, c: list[_Child]) -> ast.PlacementItem:
        axes = c[1].items if len(c) > 1 else ()
        return ast.PlacementItem(span=_span(c), kind=c[0].text, axes=axes)

    def phase(self, c: list[_Child]) -> PhaseHeader:
        kind = PHASE_KINDS[c[0].type]
        name = _name(c[1]) if kind == "named" else None
        return PhaseHeader(kind, c[1] if kind == "every" else None, name)

    def output(self, c: list[_Child]) -> ast.OutputStmt:
        return ast.OutputStmt(span=_span(c), names=c[1].items)

    def stage(self, c: list[_Child]) -> ast.StageStmt:
        return ast.StageStmt(span=_span(c), targets=c[0].items, expr=c[2])

    def load(self, c: list[_Child]) -> ast.LoadExpr:
        return ast.LoadExpr(span=_span(c), source=_name(c[1]), batch=c[2], **_clauses(c))

    def map(self, c: list[_Child]) -> ast.MapExpr:
        operands = c[3].items if isinstance(c[3], _List) else ()
        return ast.MapExpr(span=_span(c), fn=_name(c[1]), operands=operands, **_clauses(c))

    def collective(self, c: list[_Child]) -> ast.StageExpr:
        over = cast(_Over, c[2])
        return ast.StageExpr(
            span=_span(c),
            kind=c[0].text,
            operand=_name(c[1]),
            over_word=_name(over.word),
            over=over.axes.items,
            **_clauses(c),
        )

    def exchange(self, c: list[_Child]) -> ast.ExchangeExpr:
        return ast.ExchangeExpr(
            span=_span(c), gradient=_name(c[1]), states=c[3].items, fn=_name(c[5]), **_clauses(c)
        )

    def elastic(self, c: list[_Child]) -> ast.ElasticExpr:
        return ast.ElasticExpr(span=_span(c), operand=_name(c[1]), center=_name(c[3]), **_clauses(c))

    def batch(self, c: list[_Child]) -> ast.Batch:
        sizes = tuple(child for child in c if isinstance(child, ast.Number))
        over = _names_in(c)
        return ast.Batch(span=_span(c), sizes=sizes, over=over[0] if over else None)

    def over(self, c: list[_Child]) -> _Over:
        return _Over(c[0], c[1], _span(c))

    def _clause(self, c: list[_Child]) -> _Clause:
        value = c[1].items if isinstance(c[1], _List) else _value(c[1])
        return _Clause("root" if c[0].type == "FROM" else c[0].text, value, _span(c))

    only_over = split = per = visit = tail = seed = root = by = via = _clause

    def call(self, c: list[_Child]) -> ast.Call:
        args = tuple(child for child in c if isinstance(child, ast.CallArg))
        return ast.Call(span=_span(c), name=_name(c[0]), args=args if len(c) > 1 else None)

    def argument(self, c: list[_Child]) -> ast.CallArg:
        return ast.CallArg(span=_span(c), value=_value(c[-1]), key=_name(c[0]) if len(c) > 1 else None)

    def options(self, c: list[_Child]) -> ast.Options:
        items = tuple(child for child in c if isinstance(child, ast.Option))
        return ast.Options(span=_span(c), items=items)

    def option(self, c: list[_Child]) -> ast.Option:
        return ast.Option(span=_span(c), key=_name(c[0]), value=_value(c[2]))

    def names(self, c: list[_Child]) -> _List:
        return _List(_span(c), _names_in(c))

    def number(self, c: list[_Child]) -> ast.Number:
        return _number(c[0])


def _clauses(children: Sequence[_Child]) -> dict[str, Any]:
    """The clauses and the options of a stage, by the fields that they fill."""
    clauses = {child.field: child.value for child in children if isinstance(child, _Clause)}
    return clauses | ({"options": children[-1]} if isinstance(children[-1], ast.Options) else {})
