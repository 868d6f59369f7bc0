"""Order: making one collective wait for another, so that every rank issues them alike.

XLA may reorder and combine collectives that no data dependency orders, and what it honours differs
between backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.lowering.jax import _compat
from commplan.lowering.jax.primitives import assume_same, optimization_barrier
from commplan.lowering.jax.typing_shim import jnp, lax

Array = Any


def tie(x: Array, previous: Array, axis: str, *, on_cpu: bool) -> Array:
    """`x`, unchanged, but not before `previous` exists. `axis` is an axis over which `x` varies.

    GPUs keep an optimization barrier. XLA:CPU drops barriers before it combines all-reduces, so there
    every element of `x` is chosen between itself and one of `previous`, by a condition that is never
    true and that XLA cannot see through. The choice is fused into the concatenation that made `x`, so
    it costs no pass and no copy; an update of one element in place would cost both.
    """
    if x.size == 0 or previous.size == 0:
        return x
    if not on_cpu:
        return barred([x], [previous])[0][0]
    never = lax.axis_index(axis) < 0
    other = lax.stop_gradient(previous.reshape(-1)[0]).astype(x.dtype)
    other = assume_same(other, tuple(_compat.varying_axes(other) - _compat.varying_axes(x)))
    return jnp.where(never, other, x)


def barred(xs: Sequence[Array], previous: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Both, unchanged and typed as they are: `xs` not before `previous` exist, which are to be used on.

    XLA takes out of a barrier what nobody uses of what it gives, and then no order is left. GPUs only.
    """
    return optimization_barrier((list(xs), list(previous)))


def without_implied(sequence: Iterable[ir.Op], values: Mapping[str, ir.Value]) -> Iterator[ir.Op]:
    """`sequence` with those `after` left out that hold anyway, because the operand is made from that result.

    s = reduce_scatter(b); r = all_reduce(s) after s  -->  s = reduce_scatter(b); r = all_reduce(s)

    Only buffers are followed: a leaf of a tree may be made from some of the results that the tree is.
    """
    uses = DefUse(sequence)
    for op in uses.ops:
        if isinstance(op, ir.Collective) and op.after:
            implied = set(_line_of(op.operand, uses, values))
            op = replace(op, after=tuple(r for r in op.after if r not in implied))  # noqa: PLW2901
        yield op


def _line_of(ref: str, uses: DefUse[ir.Op], values: Mapping[str, ir.Value]) -> Iterator[str]:
    """`ref` and the buffers that it is made from, one from the other."""
    while len(values[ref].leaves) == 1:
        yield ref
        maker = uses.maker(ref)
        if maker is None or isinstance(maker, ir.Map | ir.Elastic | ir.Update | ir.Unpack):
            return
        sources = ir.operands(maker)
        if len(sources) != 1:
            return
        ref = sources[0]
