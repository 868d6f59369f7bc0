"""Synchronous elastic averaging against its equations (Zhang, Choromanska and LeCun 2015).

W_i <- W_i - eta (g_i + rho (W_i - C));   C <- C + eta rho sum_i (W_i - C),  W_i before the update
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import commplan

PLAN = Path(__file__).resolve().parents[2] / "examples" / "plans" / "easgd_sync.plan"
WORKERS, STEPS, ETA, RHO = 8, 12, 0.05, 0.1
SHAPES = {"w": (4, 3), "b": (3,)}


def gradient(w: Any, target: Any) -> Any:
    """Of half the squared distance to each worker's own target."""
    return {key: w[key] - target[key] for key in w}


def start() -> tuple[dict[str, Any], dict[str, Any]]:
    numbers = np.random.default_rng(3)
    draw = [
        {k: numbers.normal(size=(WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()} for _ in "ab"
    ]
    return draw[0], draw[1]


def trained() -> tuple[dict[str, Any], dict[str, Any]]:
    """Workers' weights, the center, after training under JAX."""
    weights, targets = start()
    mesh = jax.make_mesh((WORKERS,), ("worker",), axis_types=(AxisType.Auto,))
    tree = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    run = commplan.load(PLAN).compile(mesh, shapes={"params": tree}).bind(mesh)

    @jax.jit
    @run.spmd(params="params", targets="params")
    def step(state: Any, params: Any, targets: Any) -> Any:
        grads = gradient(params, targets)
        return state, {key: params[key] - ETA * grads[key] for key in params}

    @jax.jit
    @run.spmd(params="params", targets="params")
    def exchange(state: Any, params: Any, targets: Any) -> Any:
        grads = gradient(params, targets)
        out, state = run.every[4](state, params=params, eta=jnp.float32(ETA))
        return state, {key: params[key] - ETA * grads[key] - out.pull[key] for key in params}

    _, state = run.start(run.init(), params=weights)
    params = weights
    for number in range(STEPS):
        state, params = (exchange if number % 4 == 0 else step)(state, params, targets)
    return jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, state["center"])


@functools.cache
def once() -> tuple[dict[str, Any], dict[str, Any]]:
    return trained()


def by_the_equations() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same in NumPy float64, straight from the equations."""
    drawn, goals = start()
    weights = {key: array.astype(np.float64) for key, array in drawn.items()}
    center = {key: array[0].copy() for key, array in weights.items()}
    for number in range(STEPS):
        before = {key: array.copy() for key, array in weights.items()}
        for key in weights:
            pull = RHO * (before[key] - center[key]) if number % 4 == 0 else np.zeros_like(before[key])
            weights[key] = before[key] - ETA * (before[key] - goals[key] + pull)
            center[key] = center[key] + ETA * pull.sum(0)
    return weights, center


def test_training_follows_the_equations():
    params, center = once()
    expected, middle = by_the_equations()
    for key in SHAPES:
        np.testing.assert_allclose(params[key], expected[key], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(center[key], middle[key], rtol=2e-6, atol=2e-6)


def test_two_runs_are_equal_bit_by_bit():
    first, second = once(), trained()
    for before, after in zip(first, second, strict=True):
        for key in SHAPES:
            assert before[key].tobytes() == after[key].tobytes()


def test_the_center_really_moves():
    """Without this the tests above could compare two things that never change."""
    params, center = once()
    drawn, _ = start()
    for key in SHAPES:
        assert not np.array_equal(center[key], drawn[key][0])
        assert not np.array_equal(params[key], drawn[key])
