"""When a step has made which gradient, from its trace, and its computation without peers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.lowering.jax.gradient_times import gradient_times

PLAN = """\
plan timed
axis data = 2
input grads : tree partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
WIDTH, ROWS = 16, 4
SHAPES = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32") for name in ("first", "second")}


def _mesh() -> Any:
    return Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))


def _loss(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["first"]) @ params["second"])


def _scanned(params: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda carry, _: (jnp.tanh(carry @ params["first"]), None), x, length=3)
    return jnp.sum(x @ params["second"])


def _step(loss: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    run = commplan.loads(PLAN).compile(mesh, {"grads": SHAPES}).bind(mesh)

    @jax.jit
    @run.spmd(params="same", x="split data")
    def train(state: Any, params: Any, x: Any) -> Any:
        scale = lax.psum(jnp.ones(()), "data")  # communication of the step's own
        grads = jax.grad(loss)(run.varying(params), x * scale / scale)
        out, state = run.step(state, grads=grads)
        return state, jax.tree.map(lambda w, g: w - g, params, out.grads)

    same, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=same) for name, s in SHAPES.items()}
    return train, ({}, params, jax.ShapeDtypeStruct((2 * ROWS, WIDTH), "float32", sharding=split))


def test_leaves_are_ready_after_the_products_that_they_depend_on() -> None:
    times = gradient_times(*_step(_loss, _mesh()))
    assert times is not None
    # Two products forward; `second`, then the activations and `first`: five alike.
    assert times.operations == 5 * 2 * ROWS * WIDTH * WIDTH
    assert times.shares == (("grads", "second", 3 / 5), ("grads", "first", 1.0))


def test_a_loop_counts_as_often_as_it_runs() -> None:
    times = gradient_times(*_step(_scanned, _mesh()))
    assert times is not None
    # Three rounds and one product forward; two more behind it; two in each of three rounds back.
    assert times.operations == (3 + 1 + 2 + 6) * 2 * ROWS * WIDTH * WIDTH
    assert {path: share for _, path, share in times.shares}["first"] == 1.0


@pytest.mark.parametrize("loss", [_loss, _scanned])
def test_a_rank_alone_computes_its_gradients(loss: Any) -> None:
    times = gradient_times(*_step(loss, _mesh()))
    assert times is not None
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    first, second, x = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    alone = jax.jit(times.evaluate)(first, second, x)
    expected = jax.grad(loss)({"first": first, "second": second}, x)
    for gradient, name in zip(alone, ("first", "second"), strict=True):
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5)


def test_a_step_without_phases_has_no_gradients() -> None:
    assert gradient_times(lambda x: x + 1, (jnp.ones(3),)) is None
