"""The untyped syntax tree, with a source span on every node.

The parser builds it and the checker reads it; the formatter works on tokens. Names are not resolved, units
not converted and defaults not filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from commplan.diagnostics import Span
from commplan.ir.types import PhaseKind, Status


class SyntaxNode(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all nodes."""

    span: Span


def span_of(parts: Sequence[Any]) -> Span:
    """The span from the first to the last of several nodes or tokens."""
    first: Span = parts[0].span
    return first if len(parts) == 1 else first.to(parts[-1].span)


class Name(SyntaxNode, frozen=True):
    """An identifier or a word of the language."""

    text: str


class Number(SyntaxNode, frozen=True):
    """A literal: `text` as written, `value` without `_`, and `unit`, a unit of the language or None."""

    text: str
    value: int | float
    unit: str | None = None


class TypeExpr(SyntaxNode, frozen=True):
    """`f32[3, 4]`, `f32`, `bytes`, `tree`. `dims` is None without brackets."""

    name: Name
    dims: tuple[Number, ...] | None = None


class PlacementItem(SyntaxNode, frozen=True):
    """`same`, `per A, B`, `partial A`, `split A, B`, with the axes in source order."""

    kind: Status
    axes: tuple[Name, ...]


class AxisDecl(SyntaxNode, frozen=True):
    """`axis NAME = N`, `ensemble NAME = N`, `server NAME = N`; a `size` of None is `?`."""

    kind: Literal["axis", "ensemble", "server"]
    name: Name
    size: Number | None


class SourceDecl(SyntaxNode, frozen=True):
    """`source NAME : TYPE`."""

    name: Name
    type: TypeExpr


class FnDecl(SyntaxNode, frozen=True):
    """`fn NAME(TYPES) -> TYPES on host FLAGS`. `flags` are the words after `host` or `device`.

    `body` is the call of a built-in function after `=`. `results` is empty without types.
    """

    name: Name
    operands: tuple[TypeExpr, ...]
    results: tuple[TypeExpr, ...]
    where: Name | None
    flags: tuple[Name, ...] = ()
    body: CallExpr | None = None


class InputDecl(SyntaxNode, frozen=True):
    """`input NAME : TYPE PLACEMENT`."""

    name: Name
    type: TypeExpr
    placement: tuple[PlacementItem, ...] = ()


class StateDecl(SyntaxNode, frozen=True):
    """`state NAME : TYPE PLACEMENT on SERVER`."""

    name: Name
    type: TypeExpr
    placement: tuple[PlacementItem, ...] = ()
    server: Name | None = None


class TopologyDecl(SyntaxNode, frozen=True):
    """`topology "FILE"`; `path` is the text inside the quotes."""

    path: str


class CallExpr(SyntaxNode, frozen=True):
    """`hierarchical(gpu = native, node)`, `sync(eta = eta, rho = 0.1)`, `ring`, `mean(weight = n)`.

    `args` is None without parentheses.
    """

    name: Name
    args: tuple[CallArg, ...] | None = None


class CallArg(SyntaxNode, frozen=True):
    """`eta`, `0.1`, `rho = 0.1` or `gpu = native` between the parentheses of a `CallExpr`."""

    value: Name | Number
    key: Name | None = None


class Location(SyntaxNode, frozen=True):
    """`disk("PATH", 200 GiB)`: a file and its size. `path` is the text between the quotes."""

    name: Name
    path: str
    size: Name | Number


class Option(SyntaxNode, frozen=True):
    """`bucket = 25 MiB` inside braces."""

    key: Name
    value: Name | Number | Location


class Options(SyntaxNode, frozen=True):
    """The options of a stage, in braces."""

    items: tuple[Option, ...]


class BatchClause(SyntaxNode, frozen=True):
    """`batch 64`, or `batch [32, 32, 64] over MEMBER`."""

    sizes: tuple[Number, ...]
    over: Name | None = None


class LoadExpr(SyntaxNode, frozen=True):
    """`load SOURCE batch 64 split A per B visit V seed N tail T { .. }`. Absent clauses are None or empty."""

    source: Name
    batch: BatchClause
    split: tuple[Name, ...] = ()
    per: tuple[Name, ...] = ()
    visit: Name | None = None
    seed: Number | None = None
    tail: Name | None = None
    options: Options | None = None


class MapExpr(SyntaxNode, frozen=True):
    """`map FN(A, B) per AXES { .. }`."""

    fn: Name
    operands: tuple[Name, ...]
    per: tuple[Name, ...] = ()
    options: Options | None = None


class Communication(SyntaxNode, frozen=True, kw_only=True):
    """The clauses shared by stages over axes.

    Any stage may carry any of them here; the checker rejects those that a stage does not take.
    """

    over: tuple[Name, ...]
    by: CallExpr | Number | None = None
    via: CallExpr | None = None
    options: Options | None = None


class StageExpr(Communication, frozen=True):
    """A stage with one operand over some axes; `kind` is its verb.

    `over_word` is the keyword in the source, `over` or `across`.
    """

    kind: str
    operand: Name
    over_word: Name
    root: Number | None = None


class ExchangeExpr(Communication, frozen=True):
    """`exchange GRADIENT into STATES with FN over AXES by .. via .. { .. }`."""

    gradient: Name
    states: tuple[Name, ...]
    fn: Name


class ElasticExpr(Communication, frozen=True):
    """`elastic OPERAND with CENTER over AXES by .. via .. { .. }`."""

    operand: Name
    center: Name


Expr = LoadExpr | MapExpr | StageExpr | ExchangeExpr | ElasticExpr


class StageStmt(SyntaxNode, frozen=True):
    """`targets = expr`."""

    targets: tuple[Name, ...]
    expr: Expr


class OutputStmt(SyntaxNode, frozen=True):
    """`output NAMES`."""

    names: tuple[Name, ...]


class BadStmt(SyntaxNode, frozen=True):
    """A statement that did not parse. `targets` are the names before its `=`, which still get bound."""

    targets: tuple[Name, ...] = ()


class PhaseDecl(SyntaxNode, frozen=True):
    """`at start`, `each step`, `every N steps [in F fragments] [hidden under V steps]`, `phase NAME`.

    `header` spans the words before `{`.
    """

    kind: PhaseKind
    header: Span
    body: tuple[StageStmt | OutputStmt | BadStmt, ...]
    period: Number | None = None
    name: Name | None = None
    fragments: Number | None = None
    hidden: Number | None = None


Decl = AxisDecl | SourceDecl | FnDecl | InputDecl | StateDecl | TopologyDecl | PhaseDecl | BadStmt


class File(SyntaxNode, frozen=True):
    """A whole file. `name` is None if the `plan NAME` line is missing or wrong."""

    file: str
    text: str
    name: Name | None
    items: tuple[Decl, ...]
