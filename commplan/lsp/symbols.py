"""Name resolution: every declaration and value of a plan, with its uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.dsl.check.builtins import BARE
from commplan.ir.plan import Value

Kind = Literal["axis", "ensemble", "server", "source", "fn", "input", "state", "value"]


class Symbol(msgspec.Struct, eq=False):
    """A declared name, or a value bound by a stage.

    Rebinding a name creates a new symbol, except for states.

    Attributes:
        name: the name.
        kind: kind of the declaration, or `value`.
        node: the syntax tree of the declaration or stage.
        places: the locations of all uses, definition first.
        phase: location of the header of the phase that binds a value; None for declarations.
    """

    name: str
    kind: Kind
    node: ast.SyntaxNode
    places: list[Span]
    phase: Span | None = None

    @property
    def definition(self) -> Span:
        """The location of the name in the declaration or stage."""
        return self.places[0]


class Use(msgspec.Struct, frozen=True):
    """A name in the text.

    Attributes:
        span: its location.
        name: the name.
        symbol: the symbol that it names; None if it is undefined.
    """

    span: Span
    name: str
    symbol: Symbol | None


class Symbols:
    """The symbols of a syntax tree, which may contain errors.

    Args:
        tree: the syntax tree.
        values: the values that the checker could determine.

    Attributes:
        values: these values, by the location of their definition.
        declared: the declared symbols, by name; the first one of equal names.
        bound: the values bound by stages, in the order of the text.
        uses: all uses of names, sorted by location.
    """

    def __init__(self, tree: ast.File, values: Iterable[Value]) -> None:
        self.values = {value.span: value for value in values}
        self.declared: dict[str, Symbol] = {}
        self.bound: list[Symbol] = []
        self.uses: list[Use] = []
        self._tree = tree
        for item in tree.items:
            self._declare(item)
        for item in tree.items:
            self._read(item)
        self.uses.sort(key=lambda use: use.span)

    def at(self, line: int, column: int) -> Use | None:
        """The use at a location, or ending there; None if there is none."""
        return next((use for use in self.uses if _holds(use.span, line, column)), None)

    def value(self, span: Span, symbol: Symbol | None) -> Value | None:
        """The value bound at `span`, or else that of `symbol`; None if the checker could not determine it."""
        return self.values.get(span) or (self.values.get(symbol.definition) if symbol else None)

    def visible(self, line: int, column: int) -> Mapping[str, Symbol]:
        """The values that a stage at a location can read, by name: earlier values, inputs and states."""
        visible = {
            name: symbol for name, symbol in self.declared.items() if symbol.kind in ("input", "state")
        }
        before = [item for item in self._tree.items if (item.span.line, item.span.column) <= (line, column)]
        last = max(before, key=lambda item: item.span, default=None)
        phase = last.header if isinstance(last, ast.PhaseDecl) else None  # may not be closed yet
        for symbol in self.bound:
            span = symbol.node.span
            if (
                phase is not None
                and symbol.phase == phase
                and (span.end_line, span.end_column) < (line, column)
            ):
                visible[symbol.name] = symbol
        return visible

    @property
    def phases(self) -> list[ast.PhaseDecl]:
        """The phases of the syntax tree, in order."""
        return [item for item in self._tree.items if isinstance(item, ast.PhaseDecl)]

    def _declare(self, item: ast.Decl) -> None:
        """Add the symbol of a declaration, except for phases, topologies and errors."""
        kinds: dict[type[ast.SyntaxNode], Kind] = {
            ast.SourceDecl: "source", ast.FnDecl: "fn", ast.InputDecl: "input", ast.StateDecl: "state",
        }  # fmt: skip
        if isinstance(item, ast.PhaseDecl | ast.TopologyDecl | ast.BadStmt):
            return
        kind = item.kind if isinstance(item, ast.AxisDecl) else kinds[type(item)]
        symbol = self.declared.get(item.name.text)
        if symbol is None:
            symbol = self.declared[item.name.text] = Symbol(item.name.text, kind, item, [item.name.span])
        self.uses.append(Use(item.name.span, item.name.text, symbol))

    def _read(self, item: ast.Decl) -> None:
        """Resolve the names that a declaration or a phase uses."""
        match item:
            case ast.InputDecl() | ast.StateDecl():
                self._global([axis for clause in item.placement for axis in clause.axes])
                self._global([item.server] if isinstance(item, ast.StateDecl) and item.server else [])
            case ast.PhaseDecl():
                self._phase(item)
            case _:
                pass

    def _phase(self, phase: ast.PhaseDecl) -> None:
        """Resolve the names in a phase, statement by statement, since stages may rebind them."""
        bound: dict[str, Symbol] = {}

        def local(names: Iterable[ast.Name]) -> None:
            for name in names:
                self._use(name, bound.get(name.text) or self.declared.get(name.text))

        for statement in phase.body:
            match statement:
                case ast.OutputStmt():
                    local(statement.names)
                case ast.StageStmt():
                    values, declared = operands(statement.expr)
                    local(values)
                    self._global(
                        name for name in declared if name.text in self.declared or name.text not in BARE
                    )
                    self._via(statement.expr, bound)
                    self._bind(statement, phase, bound)
                case ast.BadStmt():
                    self._bind(statement, phase, bound)

    def _bind(
        self, statement: ast.StageStmt | ast.BadStmt, phase: ast.PhaseDecl, bound: dict[str, Symbol]
    ) -> None:
        """Bind the results of a stage.

        Results named like a state, or like an input of a phase with fragments, are uses of that symbol.
        """
        for name in statement.targets:
            symbol = self.declared.get(name.text)
            is_kept = symbol is not None and (
                symbol.kind == "state" or (phase.fragments is not None and symbol.kind == "input")
            )
            if symbol is None or not is_kept:
                symbol = Symbol(name.text, "value", statement, [name.span], phase.header)
                self.bound.append(symbol)
                self.uses.append(Use(name.span, name.text, symbol))
            else:
                self._use(name, symbol)
            bound[name.text] = symbol

    def _via(self, expr: ast.Expr, bound: Mapping[str, Symbol]) -> None:
        """Resolve names in parentheses: values after `by`, axes after `via`."""
        if not isinstance(expr, ast.Communication):
            return
        by = expr.by.args or () if isinstance(expr.by, ast.CallExpr) else ()
        for arg in by:
            if isinstance(arg.value, ast.Name):
                self._use(arg.value, bound.get(arg.value.text) or self.declared.get(arg.value.text))
        via = expr.via
        for arg in via.args or () if via else ():
            levels = via is not None and via.name.text == "hierarchical"
            axis = arg.key if levels and arg.key else arg.value
            if isinstance(axis, ast.Name):
                self._global([axis])

    def _global(self, names: Iterable[ast.Name]) -> None:
        """Resolve names of declarations."""
        for name in names:
            self._use(name, self.declared.get(name.text))

    def _use(self, name: ast.Name, symbol: Symbol | None) -> None:
        """Record a use of `symbol`; None if it is undefined."""
        self.uses.append(Use(name.span, name.text, symbol))
        if symbol is not None and name.span not in symbol.places:
            symbol.places.append(name.span)


def operands(expr: ast.Expr) -> tuple[Sequence[ast.Name], Sequence[ast.Name]]:
    """The values and the declared names that a stage reads."""
    match expr:
        case ast.LoadExpr():
            over = [expr.batch.over] if expr.batch.over else []
            return (), [expr.source, *expr.split, *expr.per, *over]
        case ast.MapExpr():
            return expr.operands, [expr.fn, *expr.per]
        case ast.StageExpr():
            return [expr.operand], expr.over
        case ast.ExchangeExpr():
            return [expr.gradient, *expr.states], [expr.fn, *expr.over]
        case ast.ElasticExpr():
            return [expr.operand, expr.center], expr.over


def _holds(span: Span, line: int, column: int) -> bool:
    """Whether a location is in `span`, or directly after it."""
    return (span.line, span.column) <= (line, column) <= (span.end_line, span.end_column)


def statements(tree: ast.File) -> Iterator[ast.SyntaxNode]:
    """All declarations and statements in order; a phase precedes its contents."""
    for item in tree.items:
        yield item
        if isinstance(item, ast.PhaseDecl):
            yield from item.body
