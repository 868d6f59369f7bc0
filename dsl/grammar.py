"""Parses the tokens of one statement into its node, by the grammar of `plan.lark`.

`automaton` runs the grammar, and this module has the builders of its rules. `parser` calls it for each
statement of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.dsl.automaton import Automaton
from commplan.dsl.lexer import SOFT, Token, number_value, split_number
from commplan.ir.types import PhaseKind

# The start symbols of the grammar.
Start = Literal["header", "declaration", "phase", "statement"]

_SOFT = frozenset(word.upper() for word in SOFT)  # the types of soft keywords

# The kind of a phase by the type of its first word.
PHASE_KINDS: dict[str, PhaseKind] = {"AT": "start", "EACH": "step", "EVERY": "every", "PHASE": "named"}


class PhaseHeader(NamedTuple):
    """The words before the `{` of a phase. Each field becomes the field of `ast.PhaseDecl` with its name."""

    kind: PhaseKind
    period: ast.Number | None = None
    name: ast.Name | None = None
    fragments: ast.Number | None = None
    hidden: ast.Number | None = None


class Unexpected(Exception):  # noqa: N818  (it never leaves the parser)
    """A token does not fit.

    Attributes:
        index: The index of the token in the statement; the number of tokens if the end does not fit.
        accepted: The types of tokens that fit instead, with `$END` if the statement may end.
    """

    def __init__(self, index: int, accepted: frozenset[str]) -> None:
        super().__init__(index, accepted)
        self.index = index
        self.accepted = accepted


# A parsed statement; the `Name` is that of the header `plan NAME`.
Piece = ast.Decl | ast.StageStmt | ast.OutputStmt | ast.Name | PhaseHeader


@lru_cache(maxsize=2048)  # editors parse a plan after each keystroke, which changes one statement
def parse_statement(start: Start, tokens: tuple[Token, ...]) -> Piece:
    """Parse one statement; cached.

    Args:
        start: The kind of statement.
        tokens: Its tokens, without comments and invalid tokens.

    Raises:
        Unexpected: At the first token that does not fit.
    """
    automaton = _parser_after(start, tokens)
    piece = automaton.finish()
    if piece is None:
        raise Unexpected(len(tokens), automaton.accepts())
    return cast(Piece, piece)


def _parser_after(start: Start, tokens: Sequence[Token]) -> Automaton:
    """A parser that has read `tokens`. Raises `Unexpected` at the first token that does not fit."""
    automaton = Automaton(start, _BUILD)
    for index, token in enumerate(tokens):
        kind = token.type
        if kind in _SOFT and not _is_keyword(tokens, index, automaton.choices):
            kind = "NAME"
        if not automaton.feed(kind, token if kind == token.type else token._replace(type=kind)):
            raise Unexpected(index, automaton.accepts())
    return automaton


def followers(start: Start, tokens: Sequence[Token]) -> frozenset[str]:
    """The types of tokens that may follow `tokens`, with `$END` if the statement may end there.

    Empty if `tokens` do not parse.
    """
    try:
        return _parser_after(start, tokens).accepts()
    except Unexpected:
        return frozenset()


def _is_keyword(tokens: Sequence[Token], index: int, accepted: Iterable[str]) -> bool:
    """Whether the soft keyword at `index` is a keyword there rather than a name.

    `accepted` has the types that may come next.
    """
    kind = tokens[index].type
    if kind in accepted:
        return True
    # In `load batch 64` the source is missing; it is not named `batch`.
    lacks_source = kind == "BATCH" and index > 0 and tokens[index - 1].type == "LOAD"
    return lacks_source and index + 1 < len(tokens) and tokens[index + 1].type in ("INT", "LSQB")


class _Clause(NamedTuple):
    """A clause of a statement.

    Attributes:
        field: The field of the node that the clause fills.
        value: The value of the field.
        span: The location of the clause.
    """

    field: str
    value: Any
    span: Span


class _List(NamedTuple):
    """A list of names or types, and its location."""

    span: Span
    items: tuple[Any, ...]


_Child = Any  # a Token, a node of the tree, a _Clause or a _List; every one has a span
_Children = Sequence[_Child]


def name_of(token: Token) -> ast.Name:
    """The name node of a word token."""
    return ast.Name(span=token.span, text=token.text)


def _number(token: Token) -> ast.Number:
    """The node of a number token."""
    digits, unit = split_number(token.text)
    return ast.Number(span=token.span, text=digits, value=number_value(digits), unit=unit)


def _value(child: _Child) -> Any:
    """The value of a field: the items of a list, a node for a name or number, None for `?`, or the text."""
    if isinstance(child, _List):
        return child.items
    if not isinstance(child, Token):
        return child
    match child.type:
        case "NAME" | "OVER" | "ACROSS":  # the checker points to this word of a reduction
            return name_of(child)
        case "INT" | "FLOAT" | "QUANTITY":
            return _number(child)
        case "QUESTION":
            return None
        case _:
            return child.text


def _all(kind: type[_Child], children: _Children) -> tuple[Any, ...]:
    """The children of one type."""
    return tuple(child for child in children if isinstance(child, kind))


# The node class of a rule, and the source of each field: a child by index, all children of a type, or all
# items of lists. Clauses and options fill the fields of the same name.
_NODES: dict[str, tuple[type[ast.SyntaxNode], dict[str, int | type[_Child]]]] = {
    "axis": (ast.AxisDecl, {"kind": 0, "name": 1, "size": 3}),
    "source": (ast.SourceDecl, {"name": 1, "type": 3}),
    "input": (ast.InputDecl, {"name": 1, "type": 3, "placement": ast.PlacementItem}),
    "state": (ast.StateDecl, {"name": 1, "type": 3, "placement": ast.PlacementItem}),
    "placement": (ast.PlacementItem, {"kind": 0, "axes": _List}),
    "output": (ast.OutputStmt, {"names": 1}),
    "stage": (ast.StageStmt, {"targets": 0, "expr": 2}),
    "load": (ast.LoadExpr, {"source": 1, "batch": 2}),
    "map": (ast.MapExpr, {"fn": 1, "operands": _List}),
    "collective": (ast.StageExpr, {"kind": 0, "operand": 1, "over_word": 2, "over": 3}),
    "exchange": (ast.ExchangeExpr, {"gradient": 1, "states": 3, "fn": 5}),
    "elastic": (ast.ElasticExpr, {"operand": 1, "center": 3}),
    "batch": (ast.BatchClause, {"sizes": ast.Number}),
    "options": (ast.Options, {"items": ast.Option}),
    "option": (ast.Option, {"key": 0, "value": 2}),
}
# The field of a clause by its first word, if the field has another name than the word.
_FIELDS = {"FROM": "root", "ON": "server"}


def _node(rule: str, children: _Children) -> ast.SyntaxNode:
    """The node of a rule in `_NODES`."""
    kind, sources = _NODES[rule]
    fields = {child.field: child.value for child in _all(_Clause, children)}
    if isinstance(children[-1], ast.Options):
        fields["options"] = children[-1]
    for field, source in sources.items():
        if isinstance(source, int):
            fields[field] = _value(children[source])
        elif source is _List:
            fields[field] = tuple(item for child in _all(_List, children) for item in child.items)
        else:
            fields[field] = _all(source, children)
    return kind(span=ast.span_of(children), **fields)


def _fn(children: _Children) -> ast.FnDecl:
    name, *words = (name_of(token) for token in _all(Token, children) if token.type == "NAME")
    # The lists are the operands and the results, the results alone, or none.
    *operands, results = [child.items for child in _all(_List, children)] or [()]
    types = {"operands": operands[0] if operands else (), "results": results}
    where, flags = words[0] if words else None, tuple(words[1:])
    body = next(iter(_all(ast.CallExpr, children)), None)
    return ast.FnDecl(span=ast.span_of(children), name=name, where=where, flags=flags, body=body, **types)


def _phase(children: _Children) -> PhaseHeader:
    kind = PHASE_KINDS[children[0].type]
    name = name_of(children[1]) if kind == "named" else None
    # The number after each keyword, such as `every 36 steps in 9 fragments`.
    pairs = pairwise(children)
    numbers = {word.type: number for word, number in pairs if isinstance(number, ast.Number)}
    return PhaseHeader(kind, numbers.get("EVERY"), name, numbers.get("IN"), numbers.get("UNDER"))


def _make_bracketed(
    kind: type[ast.TypeExpr | ast.CallExpr], field: str, item: type[_Child], children: _Children
) -> _Child:
    """`NAME` or `NAME(ITEMS)`; the items are None without brackets."""
    items = _all(item, children) if len(children) > 1 else None
    return kind(span=ast.span_of(children), name=name_of(children[0]), **{field: items})


def _argument(children: _Children) -> ast.CallArg:
    key = name_of(children[0]) if len(children) > 1 else None
    return ast.CallArg(span=ast.span_of(children), value=_value(children[-1]), key=key)


def _location(children: _Children) -> ast.Location:
    name, _, path, _, size, _ = children
    return ast.Location(
        span=ast.span_of(children), name=name_of(name), path=path.text[1:-1], size=_value(size)
    )


def _clause(children: _Children) -> _Clause:
    """A clause of a keyword and one value."""
    word: Token = children[0]
    return _Clause(_FIELDS.get(word.type, word.text), _value(children[1]), ast.span_of(children))


# The rules of clauses.
_CLAUSES = ("home", "member", "only_over", "split", "per", "visit", "tail", "seed", "root", "by", "via")

# The builder of each grammar rule, called with its children when the parser reduces it.
_BUILD: dict[str, Callable[[_Children], Any]] = {
    "header": lambda children: name_of(children[1]),
    "fn": _fn,
    "topology": lambda children: ast.TopologyDecl(span=ast.span_of(children), path=children[1].text[1:-1]),
    "phase": _phase,
    "type": partial(_make_bracketed, ast.TypeExpr, "dims", ast.Number),
    "types": lambda children: _List(ast.span_of(children), _all(ast.TypeExpr, children)),
    "names": lambda children: _List(ast.span_of(children), tuple(map(name_of, children[::2]))),
    "number": lambda children: _number(children[0]),
    "call": partial(_make_bracketed, ast.CallExpr, "args", ast.CallArg),
    "argument": _argument,
    "format": partial(_make_bracketed, ast.CallExpr, "args", ast.CallArg),
    "location": _location,
    **dict.fromkeys(_CLAUSES, _clause),
    **{rule: partial(_node, rule) for rule in _NODES},
}
