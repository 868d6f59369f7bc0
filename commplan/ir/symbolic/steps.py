"""Semantics shared by stages and the ops that they become: reductions, functions and servers.

The methods `meaning` of stages and ops call these functions. `env` has the values of the phase so far, and
`value` is the result to define: its leaves, types and placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from commplan.ir.codec import Codec
from commplan.ir.hints import Algorithm, Hints, weight_type
from commplan.ir.refs import Ref
from commplan.ir.symbolic import blocks
from commplan.ir.symbolic.blocks import Block
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.symbolic.rounding import allowed_event
from commplan.ir.symbolic.symbols import UNSHARED
from commplan.ir.symbolic.terms import Argument, InexpressibleError, Term
from commplan.ir.symbolic.values import SymbolicValue, leaf_shape, scalar_of, uniform_if_whole
from commplan.ir.types import DType, Operator
from commplan.ir.values import Leaf, Value


class ReductionSpec(NamedTuple):
    """How a value is reduced.

    Attributes:
        op: The operator.
        axes: The axes.
        hints: The hints of the stage.
        weight: The weight of a mean; None if there are no weights.
        via: The algorithm in the plan; None if it names none.
        sends_sum: Whether the sum is sent to all ranks. If not, scalars may be, because they are not split.
        divisor: The divisor of a mean, which divides the terms if they are added in f16, else their sum; 1
            for no division.
    """

    op: Operator
    axes: Sequence[str]
    hints: Hints
    weight: Ref | None = None
    via: Algorithm | None = None
    sends_sum: bool = True
    divisor: int = 1


class ElasticSpec(NamedTuple):
    """How workers are averaged elastically with a center.

    Attributes:
        operands: The value of the worker, and the center.
        factors: eta and rho, each a number or a scalar value.
        mode: `sync`, or how a server processes requests.
        axes: The axes.
        hints: The hints of the stage.
    """

    operands: tuple[Ref, Ref]
    factors: tuple[float | Ref, float | Ref]
    mode: str
    axes: Sequence[str]
    hints: Hints


def reduced(env: Interpretation, operand: SymbolicValue, value: Value, how: ReductionSpec) -> SymbolicValue:
    """The sum, maximum or minimum of `operand`, divided by `how.divisor`.

    Args:
        env: The values of the phase.
        operand: The value of each rank.
        value: The result, with its types.
        how: The reduction. Its weight is ignored.
    """
    op, axes, hints, divisor = how.op, how.axes, how.hints, how.divisor
    several = [axis for axis in axes if env.algebra.sizes[axis] > 1]
    adds = op in ("sum", "mean")

    def reduced_term(term: Term, dtype: DType, sends_sum: bool | None = how.sends_sum) -> Term:
        """The reduction of an element, with the rounding that the plan allows."""
        if hints.integers is not None and not dtype.is_float:
            if hints.integers == "max":
                return env.algebra.extreme("max", term, axes)
            return env.algebra.substitute(term, env.root(axes, 0))
        if hints.codec is not None and adds and several and dtype.is_float:
            return _sum_in_blocks(env, term, dtype, how._replace(sends_sum=bool(sends_sum)), hints.codec)
        divides_first = hints.divides_first(dtype)
        divides_sums = divisor > 1 and not divides_first
        event = allowed_event(
            several if adds else (), dtype, hints, sends_sum=sends_sum, divides=divides_sums
        )
        if adds and divisor > 1:
            factor = Fraction(1, divisor)
            if divides_first:
                return env.algebra.total(_times(env, term, factor, dtype), axes, event)
            return _times(env, env.algebra.total(term, axes, event), factor, dtype)
        if adds:
            return env.algebra.total(term, axes, event)
        extreme = env.algebra.extreme("max" if op == "max" else "min", term, axes)
        return extreme if event is None else env.algebra.traced(extreme, event)

    total = env.summed(operand, value, axes, reduced_term)
    are_scalars = [not leaf.shape for leaf in value.leaves]
    if how.sends_sum or not any(are_scalars) or hints.wire is hints.accumulate is hints.codec is None:
        return total
    # The sums of scalars may be sent, since every rank needs all of them; in blocks they are.
    sends = None if hints.codec is None else True
    sent_total = env.summed(operand, value, axes, lambda term, dtype: reduced_term(term, dtype, sends))
    pairs = zip(are_scalars, total.blocks, sent_total.blocks, strict=True)
    return uniform_if_whole(value, [sent if is_scalar else block for is_scalar, block, sent in pairs])


def _sum_in_blocks(env: Interpretation, term: Term, dtype: DType, how: ReductionSpec, codec: Codec) -> Term:
    """The sum or mean of an element of type `dtype`, whose terms are sent in blocks.

    The result is sent in blocks too if `how.sends_sum`; else it is rounded to `dtype`.
    """
    accumulate = how.hints.wire_types(dtype)[1]
    factor, divides_first = Fraction(1, how.divisor), how.hints.divides_first(dtype)
    if how.divisor > 1 and divides_first:
        term = _times(env, term, factor, dtype)
    total = env.algebra.total(quantized(env, term, codec, accumulate), how.axes)
    if how.divisor > 1 and not divides_first:
        total = _times(env, total, factor, accumulate)
    if how.sends_sum:
        return quantized(env, total, codec, dtype)
    if accumulate == dtype:
        return total
    return env.algebra.traced(total, ("allow", (), accumulate, accumulate, dtype, False, False))


def quantized(env: Interpretation, term: Term, codec: Codec, dtype: DType) -> Term:
    """`term` encoded in blocks and decoded to `dtype`.

    It is an opaque function of the element. The proof does not compare its neighbors, which determine the
    scale and depend on buckets.
    """
    return env.algebra.call(f"{codec} to {dtype}", (Argument(term, 0),)) if term.parts else term


def encoded(
    env: Interpretation, operand: SymbolicValue, value: Value, codec: Codec, rows: int
) -> SymbolicValue:
    """The encoded `operand`, with a column per element instead of per byte.

    Args:
        env: The values of the phase.
        operand: A flat buffer of floats.
        value: The buffer of bytes.
        codec: The block format.
        rows: The number of rows, each encoded separately.
    """
    width = operand.value.leaves[0].size // rows

    def encoded_term(term: Term) -> Term:
        return env.algebra.call(_bytes(codec, width), (Argument(term, 0),)) if term.parts else term

    return operand.each(
        value, lambda block: blocks.with_terms(blocks.in_rows(block, rows, width), encoded_term)
    )


def decoded(
    env: Interpretation, operand: SymbolicValue, value: Value, codec: Codec, width: int
) -> SymbolicValue:
    """The decoded `operand`.

    Args:
        env: The values of the phase.
        operand: A flat buffer of bytes.
        value: The buffer of floats.
        codec: The block format.
        width: The number of elements of a row.

    Raises:
        InexpressibleError: The bytes are not such rows.
    """
    (leaf,), name = value.leaves, _bytes(codec, width)

    def decoded_term(term: Term) -> Term:
        if not term.parts:
            return term
        atom, sums, trace, coefficient = term.parts[0]
        is_call = len(term.parts) == 1 and not sums and not trace and coefficient == 1 and atom.kind == "call"
        if not is_call or atom.content[0] != name:
            raise InexpressibleError(f"`{value.id}` decodes values that are not {name}")
        return quantized(env, atom.content[1][0].term, codec, leaf.dtype)

    if any(block.size != leaf.size for block in operand.blocks):
        raise InexpressibleError(f"`{value.id}` has another number of elements than were encoded")
    return operand.each(value, lambda block: blocks.with_terms(block, decoded_term))


def _bytes(codec: Codec, width: int) -> str:
    return f"bytes of {codec} in rows of {width}"


def averaged(env: Interpretation, operand: SymbolicValue, value: Value, how: ReductionSpec) -> SymbolicValue:
    """`operand` reduced, also by a mean.

    A mean is the sum divided by the number of ranks. A weighted mean is the sum of x n / sum(n), with terms
    in their accumulation type, or in their own if that is wider.

    Args:
        env: The values of the phase.
        operand: The value of each rank.
        value: The result, with its types.
        how: The reduction. Its divisor is replaced if it is a mean without weights.
    """
    if how.op != "mean":
        return reduced(env, operand, value, how)
    weight, dtypes = how.weight, [leaf.dtype for leaf in operand.value.leaves]
    hints = how.hints.for_mean(dtypes, how.via, is_weighted=weight is not None)
    how = how._replace(hints=hints)
    if weight is None:
        return reduced(env, operand, value, how._replace(divisor=math.prod(env.sizes(how.axes))))
    products = [hints.term_type(dtype) for dtype in dtypes]
    terms = converted(env, operand, operand.value.of_types(products))
    scalar = env.get(weight).value
    weight_dtype = weight_type(scalar.leaves[0].dtype, dtypes)
    count = scalar_of(converted(env, env.get(weight), scalar.of_types([weight_dtype])), 0)
    weighted = scaled_by_ratio(env, terms, terms.value, count, env.algebra.total(count, how.axes))
    total = reduced(env, weighted, value.of_types(products), how._replace(op="sum"))
    return converted(env, total, value)


def converted(env: Interpretation, operand: SymbolicValue, value: Value) -> SymbolicValue:
    """`operand` with the leaf types of `value`, as a computation of the plan rather than a rounding."""

    def converted_term(term: Term, before: DType, after: DType) -> Term:
        if before == after or not term.parts:
            return term
        return env.algebra.call(f"in {after}", (Argument(term, 0),))

    pairs = [(x.dtype, y.dtype) for x, y in zip(operand.value.leaves, value.leaves, strict=True)]
    if all(before == after for before, after in pairs):
        return operand
    if operand.uniform is not None and len(set(pairs)) == 1:
        chain, term = operand.uniform
        return SymbolicValue(value, (chain, converted_term(term, *pairs[0])))
    leaves = [
        blocks.with_terms(block, lambda term, pair=pair: converted_term(term, *pair))
        for block, pair in zip(operand.blocks, pairs, strict=True)
    ]
    return uniform_if_whole(value, leaves)


def scaled_by_ratio(
    env: Interpretation, operand: SymbolicValue, value: Value, numerator: Term, denominator: Term
) -> SymbolicValue:
    """`operand` times `numerator / denominator`, two scalars; integers are unchanged."""
    name = "times a share"  # names of users' functions have no spaces
    scalars = Argument(numerator, 1, 0), Argument(denominator, 2, 0)

    def scaled_term(term: Term, dtype: DType) -> Term:
        return env.algebra.call(name, (Argument(term, 0), *scalars)) if dtype.is_float else term

    return operand.like(value, scaled_term)


def scaled(
    env: Interpretation, operand: SymbolicValue, value: Value, how: Literal["mul", "div"], by: float | Term
) -> SymbolicValue:
    """`operand` multiplied or divided by a number, or multiplied by a scalar."""
    if isinstance(by, Term):
        scalar = Argument(by, 1, 0)
        return operand.like(
            value, lambda term, _: env.algebra.call("times a scalar", (Argument(term, 0), scalar))
        )
    factor = Fraction(by) if how == "mul" else 1 / Fraction(by)
    return operand.like(value, lambda term, dtype: _times(env, term, factor, dtype))


def _times(env: Interpretation, term: Term, factor: Fraction, dtype: DType) -> Term:
    """`term` times `factor`, with the factor in the trace; integers are the operand of a call instead.

    A positive integer up to the number of ranks is an exact coefficient: it may count how often a value that
    is the same on all ranks is added.
    """
    if factor.denominator == 1 and 0 < factor <= math.prod(env.algebra.sizes.values()):
        return env.algebra.scaled(term, factor)
    if not dtype.is_float:
        return env.algebra.call(f"times {factor} as {dtype}", (Argument(term, 0),))
    return env.algebra.times(term, factor, dtype)


def moved(
    env: Interpretation,
    operand: SymbolicValue,
    hints: Hints,
    axes: Sequence[str],
    *,
    sends_scalars: bool = True,
) -> SymbolicValue:
    """`operand` after a move without addition, which may use the wire type and uses a block format.

    Args:
        env: The values of the phase.
        operand: The value that is moved.
        hints: The hints of the stage.
        axes: The axes of the move. Along axes of one rank nothing is sent.
        sends_scalars: Whether scalars are sent too.
    """
    codec = hints.codec

    def moved_term(term: Term, dtype: DType) -> Term:
        event = allowed_event((), dtype, hints)
        return term if event is None else env.algebra.traced(term, event)

    if codec is None:
        return operand if hints.wire is None else operand.like(operand.value, moved_term)
    if max(env.sizes(axes)) == 1:
        return operand

    def moved_block(block: Block, leaf: Leaf, codec: Codec = codec) -> Block:
        if not leaf.dtype.is_float or not (sends_scalars or leaf.shape):
            return block
        return blocks.with_terms(block, lambda term: quantized(env, term, codec, leaf.dtype))

    leaves = list(map(moved_block, operand.blocks, operand.value.leaves))
    return uniform_if_whole(operand.value, leaves)


def _pull(
    env: Interpretation, operands: Sequence[Ref], factors: tuple[float | Ref, float | Ref], value: Value
) -> SymbolicValue:
    """The pull eta * rho * (operand - center); the arguments are those of `ElasticSpec`."""
    scalars = [(index, factor) for index, factor in enumerate(factors, 2) if isinstance(factor, str)]
    arguments = [Argument(env.scalar(factor), index, 0) for index, factor in scalars]

    def pulled(terms: Sequence[Term]) -> Term:
        difference = env.algebra.add([terms[0], env.algebra.scaled(terms[1], Fraction(-1))])
        return env.algebra.call(f"times {_coefficients(factors)}", [Argument(difference, 0), *arguments])

    return env.combined(env.each(operands), value, pulled)


def _coefficients(factors: tuple[float | Ref, float | Ref]) -> str:
    """`eta 0.25 and rho a value`: separately, because a product in a narrow type is rounded."""
    numbers = ("a value" if isinstance(factor, str) else repr(float(factor)) for factor in factors)
    return "eta {} and rho {}".format(*numbers)


def updated(env: Interpretation, center: SymbolicValue, total: SymbolicValue, value: Value) -> SymbolicValue:
    """`center` moved by the sum of all pulls.

    This is an opaque function of both instead of a sum of their contributions. Each further stage pulls
    towards the result of this one, so sums would have a contribution for every subset of the rates in a
    chain. The name of the function has spaces, which names of users' functions cannot have.
    """

    def plus(terms: Sequence[Term]) -> Term:
        return env.algebra.call("plus the pulls", [Argument(term, index) for index, term in enumerate(terms)])

    return env.combined([center, total], value, plus)


def server_hints(hints: Hints) -> tuple[object, ...]:
    """The hints that affect the answers of servers, and so distinguish the calls that stand for them."""
    return hints.staleness, hints.wire, hints.accumulate


def elastic(env: Interpretation, pull: Ref, result: Ref | None, how: ElasticSpec) -> None:
    """Define the pull of each worker, and the center moved by all pulls.

    A server processes one worker at a time, so its answer is an opaque function of all arguments.

    Args:
        env: The values of the phase.
        pull: The pull.
        result: The new center; None if another op makes it.
        how: The averaging.
    """
    center = how.operands[1]
    if how.mode != "sync":
        env.check_current(center)
        env.set_current(result or center)
        scalars = [factor for factor in how.factors if isinstance(factor, str)]
        marks = (how.mode, "over", *how.axes, *server_hints(how.hints), _coefficients(how.factors))
        results = (pull,) if result is None else (pull, result)
        env.call("elastic", env.each((*how.operands, *scalars)), results, marks, on_server=True)
        return
    env.put(pull, _pull(env, how.operands, how.factors, env.values[pull]))
    if result is not None:
        value = env.values[result]
        total = reduced(env, env.get(pull), value, ReductionSpec("sum", how.axes, how.hints))
        env.put(result, updated(env, env.get(center), total, value))


def loaded(
    env: Interpretation, result: Ref, label: str, varying: Sequence[str], split: Sequence[str]
) -> None:
    """Define `result` as the records of a load, before any share.

    Args:
        env: The values of the phase.
        result: The batch.
        label: A name that is equal for loads of equal records.
        varying: The axes whose members have different records.
        split: The axes along which the batch is split.
    """
    env.put(result, env.fresh_elements(label, env.values[result], varying, split, UNSHARED))


def mark_shared(
    env: Interpretation,
    result: Ref,
    operand: Ref,
    axes: Sequence[str],
    design: str,
    readers: object,
    hints: Hints,
) -> None:
    """Define `result` as `operand`, and mark each load in its terms with a share of the plan.

    Per-record functions may run before or after the share, so the mark is on the loads only. The mark has all
    arguments after `operand`, as in the op `Share`.
    """
    how = f"{design}(readers = {readers})" if readers else design
    words = f"shared over {', '.join(axes)} via {how}"
    words += f", on_failure = {hints.on_failure}" if hints.on_failure else ""
    records = env.get(operand)
    shares = {symbol for symbol in records.free if symbol[0] == "shared"}
    env.rename(result, records, {share: ("shared", tuple(sorted({*share[1], words}))) for share in shares})


def random_argument(env: Interpretation, axes: Sequence[str]) -> Argument:
    """The argument of a random function: numbers that differ between ranks along `axes`."""
    return Argument(env.algebra.value("random numbers", axes), -1)


def picked(env: Interpretation, operand: SymbolicValue, value: Value, division: str) -> SymbolicValue:
    """The current fragment of `operand`, for a `division` in words.

    The positions of its elements in the leaves are not tracked.
    """
    return _by_leaf(env, [operand], value, division)


def merged(
    env: Interpretation, whole: SymbolicValue, piece: SymbolicValue, value: Value, division: str
) -> SymbolicValue:
    """`whole`, with `piece` as its current fragment, for a `division` in words."""
    return _by_leaf(env, [whole, piece], value, f"{division} replaced")


def _by_leaf(
    env: Interpretation, operands: Sequence[SymbolicValue], value: Value, name: str
) -> SymbolicValue:
    """The call `name` on corresponding leaves of `operands`, which are cut alike and have one term each."""
    leaves: list[Block] = []
    for index, leaf in enumerate(value.leaves):
        if not leaf.size:
            leaves.append(blocks.EMPTY)
            continue
        pairs = [operand.leaf(index) for operand in operands]
        chain = pairs[0][0]
        if any(other != chain for other, _ in pairs):
            raise InexpressibleError(f"leaf `{leaf.path}` of `{value.id}` is made of differently cut leaves")
        term = env.algebra.call(name, [Argument(term, number) for number, (_, term) in enumerate(pairs)])
        leaves.append(blocks.whole(leaf_shape(value, index, chain), leaf.size, chain, term))
    return uniform_if_whole(value, leaves)
