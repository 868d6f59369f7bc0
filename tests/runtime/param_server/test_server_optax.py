"""Optax optimizers as the updates of exchanges: those that work element by element, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.exchanges import SHAPES, drawn, plan_text

import commplan
import commplan.optax
from commplan.diagnostics import CommplanError

TREE = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
SMALL = "share,rates,place,bucket{max=64},fuse_update,decompose,wire,select,overlap"
RATE = optax.exponential_decay(0.1, 2, 0.5)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1, momentum=0.9, nesterov=True), optax.adamw(RATE), optax.rmsprop(0.1), optax.lion(0.1),
     optax.chain(optax.clip(1.0), optax.adam(0.1))],
)  # fmt: skip
def test_elementwise_optimizers_are_taken(optimizer: Any) -> None:
    update = commplan.optax.update(optimizer)
    weights = {"a": jnp.ones((2, 2)), "b": jnp.zeros(3)}
    gradients = {"a": jnp.full((2, 2), 0.5), "b": jnp.arange(3.0)}
    state = commplan.optax.init(optimizer)(weights)
    new, after = update(weights, state, gradients)
    changes, expected = optimizer.update(gradients, state, weights)
    assert jax.tree.all(jax.tree.map(np.array_equal, new, optax.apply_updates(weights, changes)))
    assert jax.tree.all(jax.tree.map(np.array_equal, after, expected))


@pytest.mark.parametrize(
    "rule",
    [
        optax.clip_by_global_norm(1e6),  # which only huge gradients reach
        optax.clip_by_block_rms(1.0), optax.scale_by_trust_ratio(), optax.scale_by_factored_rms(),
        optax.centralize(), optax.apply_if_finite(optax.identity(), 3), optax.adaptive_grad_clip(0.1),
        optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        optax.add_noise(0.1, 0.5, 3),
    ],
)  # fmt: skip
def test_what_looks_at_more_than_an_element_is_refused(rule: Any) -> None:
    with pytest.raises(CommplanError, match=r"CP0822.*needs the whole tree") as error:
        commplan.optax.update(optax.chain(rule, optax.sgd(0.1)))
    assert "in the whole tree and by" in str(error.value)


def test_a_state_that_the_exchange_has_no_place_for_is_refused() -> None:
    trees = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
    stateless = commplan.optax.update(optax.sgd(0.5))
    assert np.array_equal(stateless(*trees)["w"], np.full(3, 0.5, np.float32))
    with pytest.raises(CommplanError, match=r"CP0822.*reset at every step"):
        commplan.optax.update(optax.sgd(0.5, momentum=0.9))(*trees)


def test_an_optimizer_that_wants_more_is_refused() -> None:
    with pytest.raises(CommplanError, match=r"CP0822.*cannot update a tree"):
        commplan.optax.update(optax.contrib.reduce_on_plateau())  # pyright: ignore


def trained(passes: str) -> Any:
    """Weights and state after three steps of Adam with a learning rate that decays, on eight devices."""
    optimizer = optax.adam(RATE)
    mesh = jax.make_mesh((8,), ("worker",), (AxisType.Auto,))
    shapes = {"params": TREE, "grads": TREE, "moment": jax.eval_shape(optimizer.init, TREE)}
    program = commplan.loads(plan_text({"worker": 8})).compile(mesh, shapes=shapes, passes=passes)
    functions = {"zeros": commplan.optax.init(optimizer), "update": commplan.optax.update(optimizer)}
    run: Any = program.bind(mesh, functions=functions)

    @jax.jit
    @run.spmd(returns="weights", grads="per worker")
    def step(state: Any, grads: Any) -> Any:
        out, state = run.step(state, grads=grads)
        return state, out.weights

    out, state = run.start(run.init(), params=drawn(0, (8,)))
    weights = out.weights
    for number in (1, 2, 3):
        state, weights = step(state, drawn(number, (8,)))
    return weights, state["moment"]


def test_adam_by_owners_is_adam() -> None:
    optimizer = optax.adam(RATE)
    weights: Any = jax.tree.map(lambda x: jnp.asarray(x[0]), drawn(0, (8,)))
    state: Any = optimizer.init(weights)
    for number in (1, 2, 3):
        gradients = jax.tree.map(lambda x: x.mean(0), drawn(number, (8,)))
        changes, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, changes)
    trained_weights, moment = trained(SMALL)
    for key in SHAPES:
        np.testing.assert_allclose(
            np.asarray(trained_weights[key]), np.asarray(weights[key]), rtol=2e-6, atol=1e-6
        )
    assert type(moment) is type(state)
    assert int(moment[0].count) == 3
    assert moment[0].mu["a"].addressable_shards[0].data.shape == (2,)  # of 15 elements
