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
    """Base class of all nodes. Docstrings of nodes show the syntax.

    Attributes:
        span: The location of the node in the source.
    """

    span: Span


def span_of(parts: Sequence[Any]) -> Span:
    """The span from the first to the last of at least one node or token."""
    first: Span = parts[0].span
    return first if len(parts) == 1 else first.to(parts[-1].span)


class Name(SyntaxNode, frozen=True):
    """An identifier or a word of the language."""

    text: str


class Number(SyntaxNode, frozen=True):
    """A literal.

    Attributes:
        text: The digits as written, without the unit.
        value: The value of the digits, not converted to a base unit. An int unless they have a point or an
            exponent.
        unit: One of `lexer.UNITS`; None without a unit.
    """

    text: str
    value: int | float
    unit: str | None = None


class TypeExpr(SyntaxNode, frozen=True):
    """`f32[3, 4]`, `f32`, `bytes`, `tree`. `dims` is None without brackets; the name need not be a type."""

    name: Name
    dims: tuple[Number, ...] | None = None


class PlacementItem(SyntaxNode, frozen=True):
    """`same`, `per A, B`, `partial A`, `split A, B`, with the axes in source order."""

    kind: Status
    axes: tuple[Name, ...]


class AxisDecl(SyntaxNode, frozen=True):
    """`axis NAME = N`, `ensemble NAME = N`, `server NAME = N`.

    Attributes:
        kind: The first word.
        name: The name.
        size: The size; None for `?`, a size that is set at compile time.
    """

    kind: Literal["axis", "ensemble", "server"]
    name: Name
    size: Number | None


class SourceDecl(SyntaxNode, frozen=True):
    """`source NAME : TYPE`."""

    name: Name
    type: TypeExpr


class FnDecl(SyntaxNode, frozen=True):
    """`fn NAME(TYPES) -> TYPES on host FLAGS`, or `fn NAME = BUILTIN(..)`.

    Attributes:
        name: The name.
        operands: The types of the operands; empty without types.
        results: The types of the results; empty without types.
        where: The word after `on`; None without it.
        flags: The words after `where`.
        body: The call of a built-in function after `=`; None for a function of the user.
    """

    name: Name
    operands: tuple[TypeExpr, ...]
    results: tuple[TypeExpr, ...]
    where: Name | None
    flags: tuple[Name, ...] = ()
    body: CallExpr | None = None


class InputDecl(SyntaxNode, frozen=True):
    """`input NAME : TYPE PLACEMENT`. `placement` is empty without a clause."""

    name: Name
    type: TypeExpr
    placement: tuple[PlacementItem, ...] = ()


class StateDecl(SyntaxNode, frozen=True):
    """`state NAME : TYPE PLACEMENT on SERVER`. `placement` is empty without a clause, and `server` None."""

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
    """`eta`, `0.1`, `rho = 0.1` or `gpu = native` in a `CallExpr`. `key` is None without `=`."""

    value: Name | Number
    key: Name | None = None


class Location(SyntaxNode, frozen=True):
    """`disk("PATH", 200 GiB)`: a file and its size.

    Attributes:
        name: The word before the parenthesis.
        path: The text between the quotes.
        size: The size; a `Name` is reported by the checker.
    """

    name: Name
    path: str
    size: Name | Number


class Option(SyntaxNode, frozen=True):
    """`bucket = 25 MiB` or `wire = int8(block = 32)` inside braces."""

    key: Name
    value: Name | Number | Location | CallExpr


class Options(SyntaxNode, frozen=True):
    """The options of a stage, in braces."""

    items: tuple[Option, ...]


class BatchClause(SyntaxNode, frozen=True):
    """`batch 64`, or `batch [32, 32, 64] over MEMBER`. `over` is None without the word."""

    sizes: tuple[Number, ...]
    over: Name | None = None


class LoadExpr(SyntaxNode, frozen=True):
    """`load SOURCE batch 64 split A per B visit V seed N tail T { .. }`.

    Attributes:
        source: The name of the source.
        batch: The batch sizes.
        split: The axes over which records are split; empty without the clause.
        per: The ensembles whose members load different records; empty without the clause.
        visit: The word after `visit`; None without the clause, which the checker reports.
        seed: The number after `seed`; None without the clause, which the checker reports.
        tail: The word after `tail`; None without the clause.
        options: The options in braces; None without braces.
    """

    source: Name
    batch: BatchClause
    split: tuple[Name, ...] = ()
    per: tuple[Name, ...] = ()
    visit: Name | None = None
    seed: Number | None = None
    tail: Name | None = None
    options: Options | None = None


class MapExpr(SyntaxNode, frozen=True):
    """`map FN(A, B) per AXES { .. }`. `per` is empty without the word, and `options` None without braces."""

    fn: Name
    operands: tuple[Name, ...]
    per: tuple[Name, ...] = ()
    options: Options | None = None


class Communication(SyntaxNode, frozen=True, kw_only=True):
    """The clauses of stages over axes. Any stage may have any of them; the checker rejects wrong ones.

    Attributes:
        over: The axes.
        by: The reduction, or a number for a `shift`; None without the clause.
        via: The algorithm; None without the clause.
        options: The options in braces; None without braces.
    """

    over: tuple[Name, ...]
    by: CallExpr | Number | None = None
    via: CallExpr | None = None
    options: Options | None = None


class StageExpr(Communication, frozen=True):
    """`KIND OPERAND over AXES from ROOT by .. via .. { .. }`, a stage with one operand over some axes.

    Attributes:
        kind: The verb, such as `reduce`.
        operand: The operand.
        over_word: The keyword in the source, `over` or `across`.
        root: The number after `from`; None without the clause.
    """

    kind: str
    operand: Name
    over_word: Name
    root: Number | None = None


class ExchangeExpr(Communication, frozen=True):
    """`exchange GRADIENT into STATES with FN over AXES by .. via .. { .. }`.

    Attributes:
        gradient: The operand that is added over the axes.
        states: The states that are updated; the checker limits their number.
        fn: The update function.
    """

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

    Attributes:
        kind: The kind of phase.
        header: The location of the words before `{`.
        body: The statements in braces.
        period: The N of `every`; None for other phases.
        name: The name of `phase`; None for other phases.
        fragments: The F; None without `in`.
        hidden: The V; None without `hidden`.
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
    """A whole file.

    Attributes:
        file: The file name, for diagnostics.
        text: The source, without a byte order mark.
        name: The name of the plan; None if the `plan NAME` line is missing or wrong.
        items: The declarations and phases in order, with a `BadStmt` for each that did not parse.
    """

    file: str
    text: str
    name: Name | None
    items: tuple[Decl, ...]
