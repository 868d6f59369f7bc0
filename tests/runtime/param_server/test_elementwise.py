"""A function that updates chunks sees elements alone: not their places, their neighbors or their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest

from commplan.runtime.param_server.elementwise import non_elementwise_reason

Update = Callable[[Any, Any], Any]
PATTERN = np.arange(19, dtype=np.float32) % 2


def told(function: Callable[..., Any], scalars: int = 0) -> str:
    def traced(size: int) -> Any:
        array = jax.ShapeDtypeStruct((size,), np.float32)
        return jax.make_jaxpr(function)(array, array, *[jax.ShapeDtypeStruct((), np.float32)] * scalars)

    return non_elementwise_reason(traced(16), traced(19))


def walked(carry: Any, x: Any) -> Any:
    return carry + x, carry


def halved(number: Any, x: Any) -> Any:
    return x * 0.5 + 0 * number


def centered(x: Any) -> Any:
    return x - jnp.mean(x)


def same(x: Any) -> Any:
    return x


def noise(x: Any) -> Any:
    return jax.random.normal(jax.random.key(0), x.shape)


BEYOND: list[tuple[Update, str]] = [
    (lambda w, g: w - g * jnp.arange(w.size), "`iota` produces elements from their index"),
    (lambda w, g: w - g * noise(w), "`random_bits`"),
    (lambda w, g: w - g * PATTERN[: w.size], "a constant of shape [16]"),
    (lambda w, g: w - g / g.size, "`div` has 16.0 or 19.0 by the length"),
    (lambda w, g: w - g / jnp.sqrt(jnp.sum(g * g)), "`reduce_sum`"),
    (lambda w, g: w - jnp.cumsum(g), "`cumsum`"),
    (lambda w, g: jnp.sort(w) - g, "`sort`"),
    (lambda w, g: w - g[::-1], "`rev`"),
    (lambda w, g: w - g[0], "is not known to be elementwise"),
    (lambda w, g: w - jnp.where(jnp.max(g) > 1, 0.0, g), "`reduce_max`"),
    (lambda w, g: w - jnp.outer(g, g)[0], "is not known to be elementwise"),
    (lambda w, g: w - jax.lax.scan(walked, 0.0, g)[1], "`scan` iterates"),
    (lambda w, g: jax.lax.fori_loop(0, w.size, halved, w) - g, "by the length"),
    (lambda w, g: jax.jit(centered)(w) - g, "`reduce_sum`"),
    (lambda w, g: jax.lax.cond(True, same, centered, w) - g, "`reduce_sum`"),
]
ALONE: list[Update] = [
    lambda w, g: w - 0.1 * g,
    lambda w, g: jnp.where(jnp.abs(g) > 1, w, w - jnp.clip(g, -1, 1) * jnp.ones(w.shape)),
    lambda w, g: w - np.full(w.shape, 0.5, np.float32) * jnp.tanh(g),
    lambda w, g: (w.reshape(-1, 1) - jnp.expand_dims(g, 1)).reshape(-1),
    lambda w, g: jax.lax.fori_loop(0, 3, halved, w) - jax.nn.relu(g),
    lambda w, g: w - g.astype(jnp.bfloat16).astype(jnp.float32) * jax.lax.sign(w),
]


@pytest.mark.parametrize(("function", "message"), BEYOND, ids=[said for _, said in BEYOND])
def test_what_looks_beyond_the_element_is_named(function: Update, message: str):
    assert message in told(function)


def test_what_goes_element_by_element_is_taken():
    assert [told(function) for function in ALONE] == [""] * len(ALONE)


@pytest.mark.parametrize("name", ["adamw", "adagrad", "rmsprop", "lion", "adamax", "nadam", "yogi"])
def test_optimizers_are_taken(name: str):
    optimizer: Any = getattr(optax, name)(1e-3)

    def update(w: Any, g: Any) -> Any:
        return optimizer.update(g, optimizer.init(w), w)[0]

    assert told(update) == ""


def test_scalars_are_computed_in_any_way():
    def above(x: Any) -> Any:
        return x > 1

    def half(x: Any) -> Any:
        return x / 2

    def update(w: Any, g: Any, count: Any) -> Any:
        return w - g * jax.lax.while_loop(above, half, count)

    assert told(update, 1) == ""
