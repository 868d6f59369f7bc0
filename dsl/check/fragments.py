"""Phases in fragments, and phases whose exchange is hidden under further steps.

`every N steps in F fragments` works on one fragment of every tree per call. `hidden under V steps` begins a
call before V steps of the program and ends it after them.

The checker adds the stages. A tree that the phase reads is cut (`pick`) where it enters, and a tree that it
outputs or updates is put together again (`merge`) at the end. In a hidden phase, an output that is an input,
and a stage that depends on an exchange, read the input at the end (`late`); other stages read it at the
beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commplan.diagnostics import Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext, is_scalar
from commplan.dsl.check.numbers import integer
from commplan.ir.plan import Binding, MergeStage, PickStage, Stage, Value, name_of, operands, results
from commplan.ir.types import RecordsType, TreeType

# The verbs of stages other than `ast.StageExpr`.
_VERBS: dict[type[ast.Expr], str] = {
    ast.LoadExpr: "load", ast.MapExpr: "map", ast.ExchangeExpr: "exchange", ast.ElasticExpr: "elastic",
}  # fmt: skip
# The verbs of stages that can act on fragments, without `map`.
_DIVISIBLE = ("broadcast", "reduce", "scatter", "gather", "slice", "shift")


class Division(NamedTuple):
    """The division of a phase into fragments and calls.

    Attributes:
        fragments: The number of fragments; 1 if the phase works on whole values.
        rows: The axis over which the trees of the phase are split, as a tuple; empty if they are not split,
            or there is one fragment.
        hidden: The number of steps between the beginning and the end of a call; 0 if the phase is not hidden.
    """

    fragments: int
    rows: tuple[str, ...]
    hidden: int


def division_of(ctx: CheckContext, decl: ast.PhaseDecl) -> Division | None:
    """The division of a phase; None if it works on whole values at once, or after reporting an error."""
    if decl.period is None or not (decl.fragments or decl.hidden):
        return None
    steps = decl.period.value
    fragments = integer(ctx, decl.fragments, "a number of fragments") if decl.fragments is not None else 1
    if fragments is None or not isinstance(steps, int) or steps < 1:
        return None
    if decl.fragments is not None and steps % fragments:
        message = f"{steps} steps cannot be divided into {fragments} fragments of equally many steps"
        ctx.error("CP0513", message, decl.fragments.span, *_nearest(steps, fragments))
        return None
    hidden = _hidden(ctx, decl.hidden, steps // fragments)
    if hidden is None or (fragments == 1 and not hidden):
        return None
    rows = _rows(ctx, decl) if fragments > 1 else ()
    return None if rows is None else Division(fragments, rows, hidden)


def _hidden(ctx: CheckContext, number: ast.Number | None, interval: int) -> int | None:
    """The number of steps that hide a phase, 0 without `hidden`, or None after reporting an error.

    `number` is the number after `under`. `interval` is the number of steps from one call to the next.
    """
    steps = integer(ctx, number, "a number of steps") if number is not None else 0
    if number is None or steps is None or steps <= interval:
        return steps
    message = f"an exchange every {interval} steps cannot be hidden under {steps} steps"
    return ctx.error(
        "CP0517", message, number.span, f"it has to end before the next one: 1 to {interval} steps"
    )


def _rows(ctx: CheckContext, decl: ast.PhaseDecl) -> tuple[str, ...] | None:
    """`Division.rows` of a phase in fragments, or None after reporting an error."""
    splits = {
        value.placement.split: value
        for name in _names(decl)
        if (value := ctx.inputs.get(name.text) or ctx.states.get(name.text)) and value.placement.split
    }
    if len(splits) > 1 or any(len(axes) > 1 for axes in splits):
        values = list(splits.values())
        message = "the trees of a phase in fragments are split over one axis, the same for all of them"
        return ctx.error("CP0515", message, decl.header, *values[:2])
    return next(iter(splits), ())


def _nearest(steps: int, fragments: int) -> tuple[str, str]:
    """Notes with the nearest numbers of fragments for these steps, and of steps for these fragments."""
    divisors = [n for n in range(1, min(steps, 2 * fragments) + 1) if steps % n == 0]
    below = max((n for n in divisors if n < fragments), default=None)
    above = min((n for n in divisors if n > fragments), default=None)
    counts = " or ".join(str(n) for n in (below, above) if n)
    multiple = steps // fragments * fragments
    lengths = " or ".join(str(n) for n in (multiple, multiple + fragments) if n)
    return f"{steps} steps have {counts} fragments", f"{fragments} fragments fit {lengths} steps"


def _names(decl: ast.PhaseDecl) -> Iterator[ast.Name]:
    """The names that a phase binds and reads."""
    for statement in decl.body:
        if isinstance(statement, ast.StageStmt):
            yield from statement.targets
            yield from _operands(statement.expr)
        elif isinstance(statement, ast.OutputStmt):
            yield from statement.names


def _operands(expr: ast.Expr) -> tuple[ast.Name, ...]:
    """The operands of a `map` or of a stage with one operand.

    Empty for other stages, which are errors in phases in fragments and in hidden phases.
    """
    match expr:
        case ast.MapExpr():
            return expr.operands
        case ast.StageExpr():
            return (expr.operand,)
        case _:
            return ()


def check_divisible(ctx: CheckContext, expr: ast.Expr, division: Division) -> None:
    """Report a stage that cannot act on a fragment, or whose exchange cannot be hidden.

    Raises:
        MistakeError: After reporting CP0514 or CP0518.
    """
    verb = expr.kind if isinstance(expr, ast.StageExpr) else _VERBS[type(expr)]
    if division.fragments == 1:
        if verb in ("load", "share", "exchange", "elastic"):
            ctx.fail("CP0518", f"`{verb}` cannot be hidden under steps of the program", expr.span)
        return
    if isinstance(expr, ast.MapExpr):
        fn = ctx.fns.get(expr.fn.text)
        if fn is None or (fn.where == "device" and fn.elementwise and not fn.random):
            return
        problem = "is not elementwise" if fn.where == "device" else "runs on the host"
        message = (
            f"`{fn.name}` {'is random' if fn.random else problem}, and the phase works on fragments of trees"
        )
        note = "a fn whose results depend on each element by itself can be declared `elementwise`"
        ctx.fail("CP0514", message, expr.fn.span, note)
    if verb not in _DIVISIBLE:
        note = f"a phase in fragments has the stages {listed(('map', *_DIVISIBLE))}"
        ctx.fail("CP0514", f"`{verb}` does not work on fragments of trees", expr.span, note)


class Fragments:
    """The stages that cut the values of one phase and put them together.

    Args:
        ctx: The state of the check.
        division: The division of the phase.
        stages: The stages of the phase. `pick` and `merge` append new ones.
    """

    def __init__(self, ctx: CheckContext, division: Division, stages: list[Stage]) -> None:
        self.ctx, self.division, self.stages = ctx, division, stages
        self._picked: dict[tuple[str, bool], Value] = {}  # by name and whether it is read late: the fragment
        self._merged: dict[str, Value] = {}  # by the id of a fragment: the whole value
        self._arrived: set[str] = set()  # values that depend on an exchange
        self._late: set[str] = set()  # values that depend on inputs that are read late

    def pick(self, name: ast.Name, value: Value, *, late: bool = False) -> Value | None:
        """The current fragment of an input or state; None after reporting an error.

        Scalars are not cut. If there is one fragment, it is `value` itself, unless it is read late.

        Args:
            name: The name in the source.
            value: The value on entry.
            late: Whether it is read at the end of a hidden phase.
        """
        fragments, rows, _ = self.division
        if is_scalar(value.type) or (fragments == 1 and not late):
            return value
        if (name.text, late) in self._picked:
            return self._picked[name.text, late]
        cuts = isinstance(value.type, TreeType) and not value.placement.server and not value.placement.partial
        if fragments > 1 and not cuts:
            message = f"`{name.text}` cannot be cut into fragments"
            note = "fragments are cut out of trees on the workers that are not terms of a sum"
            return self.ctx.error("CP0515", message, name.span, value, note)
        piece = self._picked[name.text, late] = self._new(value, name.span)
        self.stages.append(PickStage(fragments, rows, late, name.span, piece.id, value.id))
        self._late |= {piece.id} if late else set()
        if not late:
            self._merged[piece.id] = value
        return piece

    def prepare(self, expr: ast.Expr, env: dict[str, Value | None]) -> None:
        """Pick the inputs among the operands of a stage early, or late if it depends on an exchange."""
        names = _operands(expr)
        current = [env.get(name.text) for name in names]
        self.read(names, env, late=any(value is not None and value.id in self._arrived for value in current))

    def read(self, names: Sequence[ast.Name], env: dict[str, Value | None], *, late: bool) -> None:
        """Pick the inputs of `names` that no stage has bound, in a hidden phase. Changes `env`."""
        if not self.division.hidden:
            return
        for name in names:
            entry, value = self.ctx.inputs.get(name.text), env.get(name.text)
            reads = [entry, *(self._picked.get((name.text, late)) for late in (False, True))]
            is_bound = name.text in env and (value is None or value not in reads)
            if entry is not None and not is_bound and name.text not in self.ctx.unknown:
                env[name.text] = self.pick(name, entry, late=late)

    def add(self, stage: Stage, span: Span) -> None:
        """Record which results depend on an exchange, and on inputs that are read late, in a hidden phase.

        Reports an exchange that depends on an input that is read late.
        """
        if not self.division.hidden:
            return
        reads, values = set(operands(stage)), results(stage)
        exchanges = getattr(stage, "COLLECTIVE", None) is not None
        if exchanges and reads & self._late:
            message = f"the exchange of `{name_of(values[0])}` would not be hidden"
            note = "it depends on an input that is read after the steps, with the result of another exchange"
            self.ctx.error("CP0518", message, span, note)
        self._late.update(values if reads & self._late else ())
        self._arrived.update(values if exchanges or reads & self._arrived else ())

    def check_exchange(self, bindings: Sequence[Binding], span: Span) -> None:
        """Report a hidden phase none of whose outputs and states depends on an exchange."""
        if self.division.hidden and self._arrived.isdisjoint(binding.value for binding in bindings):
            note = "leave `hidden` out, or exchange a value that an output or a state depends on"
            self.ctx.error("CP0518", "the phase exchanges nothing that steps could hide", span, note)

    def merge(self, name: str, piece: Value, span: Span) -> Value | None:
        """The input or state `name` with `piece` as its current fragment; None after reporting an error.

        It is `piece` itself if that is not a tree, or if there is one fragment.
        """
        fragments, rows, hidden = self.division
        whole = self.ctx.inputs.get(name) or self.ctx.states.get(name)
        if fragments == 1 or isinstance(piece.type, RecordsType) or not isinstance(piece.type, TreeType):
            return piece
        if whole is None:
            message = f"the output `{name}` is a fragment, and `{name}` is not an input or a state"
            note = "a fragment replaces that part of the input or state of its name"
            return self.ctx.error("CP0516", message, span, piece, note)
        new_axes = [axis for axis in piece.placement.per if axis not in whole.placement.per]
        if new_axes or piece.placement.split != whole.placement.split:
            message = f"`{name}` enters as {whole.placement}, and its fragment is {piece.placement}"
            note = "a value keeps the placement of its other fragments"
            return self.ctx.error("CP0516", message, span, whole, note)
        if piece.id not in self._merged:
            merged = self._merged[piece.id] = self._new(whole, span)
            late = hidden > 0 and name in self.ctx.inputs
            stage = MergeStage(fragments, rows, late, span, merged.id, whole.id, piece.id)
            self.stages.append(stage)
            self._arrived |= {merged.id} if piece.id in self._arrived else set()
        return self._merged[piece.id]

    def _new(self, value: Value, span: Span) -> Value:
        """A new version of a value, of the same type and placement."""
        return self.ctx.new_value(ast.Name(span=span, text=value.name), value.type, value.placement)
