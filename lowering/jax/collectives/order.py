"""Order: making one collective wait for another, so that every rank issues them alike.

XLA may reorder and combine collectives that no data dependency orders, and what it honours differs
between backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
