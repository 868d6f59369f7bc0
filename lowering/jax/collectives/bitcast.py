"""Moves and compares floats as integers of the same width.

XLA may widen floats, quiet a NaN, or lose the sign of a zero. Integers with the same bits are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_BITS: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}  # by bytes of a float
_SIGNED: dict[int, Any] = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}  # by bytes of a float


def to_bits(x: Array, *, always: bool = False) -> Array:
    """`x` as unsigned integers with the same bits, if it has floats of 2 bytes, which XLA:CPU would widen.

    With `always`, floats of all widths are converted. Booleans become u8. Other arrays are unchanged.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if not jnp.issubdtype(x.dtype, jnp.floating) or (x.dtype.itemsize != 2 and not always):
        return x
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def from_bits(moved: Array, dtype: Any) -> Array:
    """The inverse of `to_bits`; `dtype` is that of the original array."""
    if moved.dtype == dtype:
        return moved
    if dtype == jnp.bool_:
        return moved.astype(jnp.bool_)
    return lax.bitcast_convert_type(moved, dtype)


def as_bits(move: Callable[[Array], Array], x: Array, *, always: bool = False) -> Array:
    """`move(x)`, computed on the bits of `x` (see `to_bits`).

    JAX treats the derivative of a bitcast as zero. `move` is linear, so its derivative is `move` itself.

    Args:
        move: A function that only rearranges elements, or sums them with zeros.
        x: The operand.
        always: Whether floats of all widths are moved as integers.
    """
    bits = to_bits(x, always=always)
    if bits.dtype == x.dtype or x.dtype == jnp.bool_:
        return from_bits(move(bits), x.dtype)
    return with_derivative(lambda x: from_bits(move(to_bits(x, always=always)), x.dtype), move, x)


def as_ordered(extreme: Callable[[Array], Array], x: Array, op: str) -> Array:
    """The maximum or minimum over ranks, `extreme(x)`, computed on integers in the order of the floats.

    NaN wins for both, and -0.0 is less than 0.0. The maximum of XLA:CPU and NCCL ignores NaN, and XLA:CPU
    treats subnormals as zero.

    Args:
        extreme: The maximum or minimum over ranks, for arrays of integers.
        x: This rank's operand: floats of 2, 4 or 8 bytes.
        op: `max` or `min`, the reduction of `extreme`.

    Raises:
        NotImplementedError: When differentiated, since JAX has no derivative of `lax.pmax`.
    """

    def derivative(_: Array) -> Array:
        raise NotImplementedError(f"JAX does not differentiate {op} over ranks")

    def combined(x: Array) -> Array:
        return from_ordered(extreme(to_ordered(x, is_maximum=op == "max")), dtype=x.dtype)

    return with_derivative(combined, derivative, x)


# Jitted so that tools find them in a jaxpr by name.
@functools.partial(jax.jit, static_argnames="is_maximum")
def to_ordered(x: Array, *, is_maximum: bool) -> Array:
    """Signed integers in the order of the floats `x`. NaN is the largest, or for a minimum the smallest."""
    bits = lax.bitcast_convert_type(x, _SIGNED[x.dtype.itemsize])
    limits = jnp.iinfo(bits.dtype)
    ordered = jnp.where(bits < 0, bits ^ limits.max, bits)
    return jnp.where(jnp.isnan(x), jnp.asarray(limits.max if is_maximum else limits.min, bits.dtype), ordered)


@functools.partial(jax.jit, static_argnames="dtype")
def from_ordered(ordered: Array, *, dtype: Any) -> Array:
    """The inverse of `to_ordered`, with floats of `dtype`; all NaNs become the same NaN."""
    limits = jnp.iinfo(ordered.dtype)
    bits = jnp.where(ordered < 0, ordered ^ limits.max, ordered)
    is_nan = (ordered == limits.max) | (ordered == limits.min)
    nan = lax.bitcast_convert_type(jnp.asarray(jnp.nan, dtype), ordered.dtype)
    return lax.bitcast_convert_type(jnp.where(is_nan, nan, bits), dtype)


def with_derivative(function: Callable[[Array], Array], linear: Callable[[Array], Array], x: Array) -> Array:
    """`function(x)`, whose derivative JAX computes from another function.

    Args:
        function: A function that JAX cannot differentiate, or whose derivative would be wrong.
        linear: A linear function with the same results, up to rounding.
        x: The operand.
    """

    @jax.custom_jvp
    def carried(x: Array) -> Array:
        return function(x)

    def derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return carried(*primals), linear(*tangents)

    carried.defjvp(derivative)
    return carried(x)
