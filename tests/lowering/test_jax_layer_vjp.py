"""The residuals of a layer's backward pass: no value that depends on its weights alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commplan.lowering.jax.layers.vjp import layer_vjp

WEIGHTS = {"w": jnp.linspace(-1, 1, 48).reshape(8, 6), "b": jnp.ones(6)}
X = jnp.linspace(0, 1, 16).reshape(2, 8)


def plain(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights["w"] + weights["b"])


def narrow(weights: Any, x: Any) -> Any:
    """Products in bfloat16 inside of a jitted function, a transpose, and a scaled weight."""
    kernel = (weights["w"] * 2).astype(jnp.bfloat16).T
    return jnp.einsum("bi,oi->bo", x.astype(jnp.bfloat16), kernel).astype(jnp.float32) * weights["b"]


@pytest.mark.parametrize("body", [plain, narrow, jax.checkpoint(plain), jax.checkpoint(narrow)])
def test_the_derivative_is_that_of_jax(body: Callable[[Any, Any], Any]):
    layer = layer_vjp(body, WEIGHTS, X)
    weights, cotangent = jax.tree.leaves(WEIGHTS), jnp.cos(jnp.arange(12.0)).reshape(2, 6)
    (result,), residuals = layer.forward(layer.consts, weights, [X])
    np.testing.assert_array_equal(result, layer.run(layer.consts, weights, [X])[0])
    assert all(
        leaf.shape[:1] == (2,) for leaf in residuals
    )  # rows of a batch: no weight, and nothing made of one
    _, of_weights, of_x = layer.backward(layer.consts, weights, residuals, [cotangent])
    expected = jax.jit(lambda w, x: jax.vjp(body, w, x)[1](cotangent))(WEIGHTS, X)
    for mine, other in zip([*of_weights, *of_x], jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-2, atol=1e-6)


def test_a_lookup_needs_no_weights_in_its_backward_pass():
    layer = layer_vjp(lambda weights, tokens: weights[tokens], WEIGHTS["w"], jnp.array([1, 3, 1]))
    assert not layer.needs_weights
    assert layer_vjp(plain, WEIGHTS, X).needs_weights
    _, residuals = layer.forward(layer.consts, [WEIGHTS["w"]], [jnp.array([1, 3, 1])])
    _, (gradient,), (of_tokens,) = layer.backward(layer.consts, [], residuals, [jnp.ones((3, 6))])
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 1, 0, 0, 0, 0])
    assert of_tokens is None


def test_what_a_body_closes_over_has_a_cotangent():
    shift = jnp.full(6, 0.5)

    @jax.jit
    def cotangents(shift: Any) -> Any:
        layer = layer_vjp(lambda weights, x: plain(weights, x) * shift, WEIGHTS, X)
        weights = jax.tree.leaves(WEIGHTS)
        _, residuals = layer.forward(layer.consts, weights, [X])
        return layer.backward(layer.consts, weights, residuals, [jnp.ones((2, 6))])[0]

    (cotangent,) = [x for x in cotangents(shift) if x is not None and x.shape == (6,)]
    np.testing.assert_allclose(cotangent, plain(WEIGHTS, X).sum(0), rtol=1e-6)
