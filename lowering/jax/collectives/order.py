"""Orders collectives, so that every rank issues them in the same order.

XLA may reorder and combine collectives without data dependencies. Which dependencies it preserves differs
between platforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from commplan.lowering.jax import _compat
from commplan.lowering.jax.primitives import assume_same, optimization_barrier


def tie(x: Array, previous: Array, axis: str, *, on_cpu: bool) -> Array:
    """`x`, unchanged, ordered after `previous`.

    XLA:GPU preserves optimization barriers. XLA:CPU removes barriers before it combines all-reduces. There,
    every element of `x` is selected between itself and an element of `previous`, by a condition that is
    always false but that XLA cannot evaluate. The selection is fused into the concatenation that produced
    `x`, so it takes no extra pass and no copy; updating one element in place would take both.

    Args:
        x: The array to order. If it has no elements, it is not ordered.
        previous: The array that must be available before. If it has no elements, `x` is not ordered.
        axis: An axis over which `x` varies, with at least two ranks.
        on_cpu: Whether the devices are CPUs.
    """
    if x.size == 0 or previous.size == 0:
        return x
    if not on_cpu:
        return with_barriers([x], [previous])[0][0]
    never = lax.axis_index(axis) < 0
    other = lax.stop_gradient(previous.reshape(-1)[0]).astype(x.dtype)
    other = assume_same(other, tuple(_compat.varying_axes(other) - _compat.varying_axes(x)))
    return jnp.where(never, other, x)


def with_barriers(
    xs: Sequence[Array | None], previous: Sequence[Array | None]
) -> tuple[list[Any], list[Any]]:
    """Order `xs` after `previous` by an optimization barrier, and return both. Types are preserved.

    None stays None, and nothing is ordered if all of `xs` or all of `previous` are None.

    XLA:CPU does not keep collectives in this order. Callers must use the returned `previous`: XLA removes
    unused results from a barrier, and with them the order.
    """
    if all(x is None for x in xs) or all(x is None for x in previous):
        return list(xs), list(previous)
    return optimization_barrier((list(xs), list(previous)))
