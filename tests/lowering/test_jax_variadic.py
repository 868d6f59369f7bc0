"""All-reduces of arrays as they are: the way of GPUs, on CPU devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import commplan
from commplan.lowering.jax import variadic
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import flatten
from commplan.lowering.xla_passes import COPYING, DISABLED_PASSES

PLAN = """plan p
axis data = 8
input grads : tree partial data
each step {
    grads = reduce grads over data by sum { bucket = 1 MiB }
    output grads
}
"""
LEAVES = {  # of one bucket, or of several; cut into parts; packed; empty
    "a": ((512, 512), "float32"), "b": ((7,), "float32"), "c": ((1300, 1024), "float32"),
    "d": ((), "float32"), "e": ((3, 5), "float32"), "f": ((700, 1024), "bfloat16"), "g": ((9,), "bfloat16"),
    "h": ((0, 4), "float32"),
}  # fmt: skip


def given() -> dict[str, Any]:
    """Whole numbers, small enough for every sum to be exact; one array for each rank."""
    draw = np.random.default_rng(0)
    return {n: jnp.asarray(draw.integers(0, 16, (8, *shape)), dtype) for n, (shape, dtype) in LEAVES.items()}


@pytest.mark.parametrize("options", [{}, {DISABLED_PASSES: COPYING}], ids=["packed", "as they are"])
def test_every_leaf_is_summed(options: dict[str, str]) -> None:
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in LEAVES.items()}
    schedule = commplan.loads(PLAN).compile(shapes={"grads": shapes}).schedule
    lowered = Lowered(schedule, schedule.phase("step"), {}, LaxBackend("gpu", {"data": 8}))

    def step(grads: Any) -> Any:
        _, tree = flatten(jax.tree.map(lambda leaf: leaf[0], grads))
        return lowered.run({"grads": tree}, {})[0]["grads"].leaves

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    traced = variadic.compiled_with(
        options, jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    )
    grads = given()
    text = jax.jit(traced).lower(grads).as_text()
    assert ("combiner_key" in text) is bool(options)
    assert variadic.is_enabled() is False
    for name, total in zip(LEAVES, jax.jit(traced)(grads), strict=True):
        np.testing.assert_array_equal(
            np.asarray(total, np.float32), np.asarray(grads[name], np.float32).sum(0)
        )
