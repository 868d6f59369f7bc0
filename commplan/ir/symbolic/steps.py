"""What stages, and the ops that they become, have in common: the meaning of reductions, functions and
servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from commplan.ir.hints import Hints
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.symbolic.rounding import allowed, holds
from commplan.ir.symbolic.terms import Argument, Term, at, rank
from commplan.ir.symbolic.values import SymbolicValue
from commplan.ir.types import DType
from commplan.ir.values import Value

ReductionName = Literal["sum", "mean", "max", "min"]


def reduced(
    env: Interpretation,
    operand: SymbolicValue,
    value: Value,
    axes: Sequence[str],
    op: ReductionName,
    hints: Hints,
    *,
    again: bool = True,
) -> SymbolicValue:
    """`operand` added up, or its maximum or minimum taken, over `axes`; what a mean divides by is left to the
    caller. again: what is added up is sent to everyone."""
    several = [axis for axis in axes if env.algebra.sizes[axis] > 1]
    adds = op in ("sum", "mean")

    def one(term: Term, dtype: DType) -> Term:
        event = allowed(several if adds else (), dtype, hints, again=again)
        if event is not None and env.written_out and not holds(dtype, event[3]):
            event = None  # no backend adds in a wider type than the operand has
        if adds:
            return env.algebra.total(term, axes, event)
        made = env.algebra.extreme("max" if op == "max" else "min", term, axes)
        return made if event is None else env.algebra.traced(made, event)

    return env.summed(operand, value, axes, one)


def averaged(
    env: Interpretation,
    operand: SymbolicValue,
    value: Value,
    axes: Sequence[str],
    op: ReductionName,
    weight: Ref | None,
    hints: Hints,
    *,
    again: bool = True,
) -> SymbolicValue:
    """`operand` reduced over `axes`: a mean is the sum over the number of ranks, a weighted one sum(n x) /
    sum(n)."""
    if weight is None or op != "mean":
        made = reduced(env, operand, value, axes, op, hints, again=again)
        if op != "mean":
            return made
        ranks = 1
        for size in env.sizes(axes):
            ranks *= size
        return scaled(env, made, value, "div", ranks)
    count = env.scalar(weight)
    weighted = scaled(env, operand, operand.value, "mul", count)
    total = env.algebra.total(count, axes)
    summed = reduced(env, weighted, value, axes, "sum", hints, again=again)
    return scaled(env, summed, value, "div", total)


def scaled(
    env: Interpretation, operand: SymbolicValue, value: Value, how: Literal["mul", "div"], by: float | Term
) -> SymbolicValue:
    """`operand` times, or over, a number or a scalar."""
    if isinstance(by, Term):
        name = "times a scalar" if how == "mul" else "over a scalar"  # no function can be called so
        return operand.like(
            value, lambda term, _: env.algebra.call(name, (Argument(term, 0), Argument(by, 1, 0)))
        )
    factor = Fraction(by) if how == "mul" else 1 / Fraction(by)
    return operand.like(value, lambda term, dtype: _times(env, term, factor, dtype))


def _times(env: Interpretation, term: Term, factor: Fraction, dtype: DType) -> Term:
    """`term` times `factor`, which a trace keeps but where ranks are counted: a number of them says how often
    what is the same for all is added up."""
    if factor.denominator == 1 and 0 < factor <= math.prod(env.algebra.sizes.values()):
        return env.algebra.scaled(term, factor)
    if not dtype.is_float:
        return env.algebra.call(f"times {factor} as {dtype}", (Argument(term, 0),))
    return env.algebra.traced(env.algebra.scaled(term, factor), ("scale", factor))


def moved(env: Interpretation, held: SymbolicValue, hints: Hints) -> SymbolicValue:
    """`held` after a move, which may have been made in the wire type."""

    def one(term: Term, dtype: DType) -> Term:
        event = allowed((), dtype, hints)
        return term if event is None else env.algebra.traced(term, event)

    return held if hints.wire is None else held.like(held.value, one)


def pull(
    env: Interpretation, operand: Ref, center: Ref, eta: float | Ref, rho: float | Ref, value: Value
) -> SymbolicValue:
    """eta * rho * (operand - center)."""
    scalars = [env.scalar(x) for x in (eta, rho) if isinstance(x, str)]
    literal = Fraction(1)
    for number in (eta, rho):
        literal *= 1 if isinstance(number, str) else Fraction(number)
    arguments = [Argument(term, 2 + index, 0) for index, term in enumerate(scalars)]

    def one(terms: Sequence[Term]) -> Term:
        difference = env.algebra.add([terms[0], env.algebra.scaled(terms[1], Fraction(-1))])
        if not arguments:
            return _times(env, difference, literal, value.leaves[0].dtype)
        return env.algebra.call(f"times {literal}", [Argument(difference, 0), *arguments])

    return env.combined([env.of(operand), env.of(center)], value, one)


def exchange(
    env: Interpretation,
    gradient: Ref,
    states: Sequence[Ref],
    results: Sequence[Ref],
    fn: str,
    axes: Sequence[str],
    op: ReductionName,
    weight: Ref | None,
    hints: Hints,
) -> None:
    """results = fn(states, reduced gradient); on servers what comes back depends on what others have sent,
    so that it is a function of everything that is said of it."""
    if env.values[states[0]].placement.server is not None:
        for state, result in zip(states, results, strict=True):
            env.check_current(state)
            env.set_current(result)
        marks = ("exchange over", *axes, op, hints.staleness, hints.on_failure, hints.wire, hints.accumulate)
        env.call(
            fn, env.each((gradient, *states, *((weight,) if weight else ()))), results, marks, served=True
        )
        return
    operand = env.of(gradient)
    total = averaged(env, operand, operand.value, axes, op, weight, hints, again=False)
    env.call(fn, [*env.each(states), total], results)


def elastic(
    env: Interpretation,
    pulled: Ref,
    result: Ref | None,
    operand: Ref,
    center: Ref,
    eta: float | Ref,
    rho: float | Ref,
    mode: str,
    axes: Sequence[str],
    hints: Hints,
) -> None:
    """The pull of each worker and, where `result` is made at once, the centre moved by the sum of all pulls.
    A server takes one worker at a time, so that what comes back is a function of everything that is said of
    it."""
    if mode != "sync":
        env.check_current(center)
        env.set_current(result or center)
        marks = (mode, "over", *axes, hints.staleness, hints.on_failure, hints.wire, hints.accumulate)
        numbers = [str(x) for x in (eta, rho) if not isinstance(x, str)]
        scalars = [x for x in (eta, rho) if isinstance(x, str)]
        results = (pulled, *((result,) if result is not None else ()))
        env.call("elastic", env.each((operand, center, *scalars)), results, (*marks, *numbers), served=True)
        return
    env.put(pulled, pull(env, operand, center, eta, rho, env.values[pulled]))
    if result is not None:
        total = reduced(env, env.of(pulled), env.values[result], axes, "sum", hints)
        env.put(result, env.combined([env.of(center), total], env.values[result], env.algebra.add))


def called(
    env: Interpretation,
    fn: str,
    operands: Sequence[Ref],
    results: Sequence[Ref],
    per: Sequence[str],
    *,
    by_record: bool,
) -> None:
    """results = fn(operands). A random function draws other numbers in every call, on the device for every
    name of a result, along `per` and, of whole values, for each part and each shape of what it is given."""
    given = env.each(operands)
    if fn not in env.random:
        env.call(fn, given, results, by_record=by_record)
        return
    split = env.values[operands[0]].placement.split if operands and not by_record else ()
    shapes = () if by_record else (tuple(leaf.shape for leaf in held.value.leaves) for held in given)
    name = results[0] if env.random[fn] == "device" else base_name(results[0])
    env.draws[name] += 1
    marks = ("drawn for", name, env.draws[name], *split, *shapes)
    differing = per if fn in env.elementwise else (*per, *split)  # where an element stands says of which part
    drawn = [Argument(env.algebra.value("what is drawn", differing), -1)]
    env.call(fn, given, results, marks, by_record=by_record, drawn=drawn)


def at_first(env: Interpretation, held: SymbolicValue, value: Value, axes: Sequence[str]) -> SymbolicValue:
    """`held` as the first rank along `axes` has it."""
    symbols = {rank(axis): at(0) for axis in axes if env.algebra.sizes.get(axis, 1) > 1}
    return held.renamed(env.algebra, value, symbols)


def loaded(
    env: Interpretation,
    result: Ref,
    count: Ref | None,
    source: str,
    said: Sequence[object],
    split: Sequence[str],
    per: Sequence[str],
    clock: str | None,
) -> None:
    """Records of a source: which these are follows from all that is `said` of the load."""
    told = ", ".join(map(str, (*said, "per", *per, "by", clock)))
    label = f"{source}({base_name(result)}; {told})"
    own = (*per, *((clock,) if clock and clock not in per else ()))
    env.put(result, env.own_elements(label, env.values[result], own, split))
    if count is not None:
        env.put(count, env.own_elements(f"the number of {label}", env.values[count], (*own, *split), ()))


def base_name(ref: Ref) -> str:
    """What a value was called before passes made several of it."""
    return ref.partition("/")[0].partition("~")[0]
