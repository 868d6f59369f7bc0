"""Order: making one collective wait for another, so that every rank issues them alike.

XLA may reorder and combine collectives that no data dependency orders, and what it honours differs
between backends.
"""

from __future__ import annotations

from typing import Any

from commplan.lowering.jax import _compat
from commplan.lowering.jax.collectives import Backend
from commplan.lowering.jax.untyped import jnp, lax

Array = Any


def tie(x: Array, previous: Array, axis: str, backend: Backend) -> Array:
    """`x`, unchanged, but not before `previous` exists. `axis` is an axis over which `x` varies.

    GPUs keep an optimization barrier. XLA:CPU drops barriers before it combines all-reduces, so there
    every element of `x` is chosen between itself and one of `previous`, by a condition that is never
    true and that XLA cannot see through. The choice is fused into the concatenation that made `x`, so
    it costs no pass and no copy; an update of one element in place would cost both.
    """
    if x.size == 0 or previous.size == 0:
        return x
    if not backend.on_cpu:
        return lax.optimization_barrier((x, previous))[0]
    never = lax.axis_index(axis) < 0
    other = lax.stop_gradient(previous.reshape(-1)[0]).astype(x.dtype)
    other = _compat.assume_same(other, tuple(_compat.varying_axes(other) - _compat.varying_axes(x)))
    return jnp.where(never, other, x)
