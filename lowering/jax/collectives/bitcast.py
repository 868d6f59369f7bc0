"""Floats carried as integers of their width, where a move might change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commplan.lowering.jax.typing_shim import jax, jnp, lax

Array = Any

_BITS: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def to_bits(x: Array, *, always: bool = False) -> Array:
    """Floats as integers of their width: those of 2 bytes, which XLA:CPU would widen on the way, or all."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if not jnp.issubdtype(x.dtype, jnp.floating) or (x.dtype.itemsize != 2 and not always):
        return x
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def from_bits(moved: Array, dtype: Any) -> Array:
    """The way back to `dtype`."""
    if moved.dtype == dtype:
        return moved
    if dtype == jnp.bool_:
        return moved.astype(jnp.bool_)
    return lax.bitcast_convert_type(moved, dtype)


def as_bits(move: Callable[[Array], Array], x: Array, *, always: bool = False) -> Array:
    """`move(x)`, where `move` only carries elements about, carried as integers.

    Integers have no derivative, and JAX takes that of a bitcast for zero: `move` is linear, so its
    derivative is itself.
    """
    bits = to_bits(x, always=always)
    if bits.dtype == x.dtype or x.dtype == jnp.bool_:
        return from_bits(move(bits), x.dtype)
    return with_derivative(lambda x: from_bits(move(to_bits(x, always=always)), x.dtype), move, x)


def with_derivative(function: Callable[[Array], Array], linear: Callable[[Array], Array], x: Array) -> Array:
    """`function(x)`, a linear function that JAX is to differentiate as `linear`, which is the same."""

    @jax.custom_jvp
    def carried(x: Array) -> Array:
        return function(x)

    def derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return carried(*primals), linear(*tangents)

    carried.defjvp(derivative)
    return carried(x)
