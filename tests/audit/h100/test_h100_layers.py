"""Sharded weights compiled ahead of time for 8 H100: layers are gathered and scattered under others."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.lowering.audit import audit_text, target
from commplan.lowering.jax.aot import devices

PLAN = """plan sharded
axis data = 8
input weights : tree split data
input grads   : tree partial data
each step {
    whole = gather weights over data
    grads = scatter grads over data by mean
    output whole, grads
}
"""
LAYERS, WIDTH, ROWS = 6, 4096, 16384


def block(weights: Any, x: Any) -> Any:
    return x + jax.nn.relu(x @ weights["up"] + weights["b"]) @ weights["down"]


@pytest.mark.parametrize("scan", [False, True])
def test_gathers_and_scatters_lie_under_products(scan: bool):
    mesh = Mesh(devices(target("h100:1x8")).reshape(-1), ("data",))
    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16")
    like = {"up": square, "b": jax.ShapeDtypeStruct((WIDTH,), "bfloat16"), "down": square}
    run = commplan.loads(PLAN).compile(mesh, shapes={"weights": like, "grads": like}).bind(mesh)

    @run.spmd(shards="split data", x="split data")
    def train(state: Any, shards: Any, x: Any) -> Any:
        def loss(shards: Any) -> Any:
            layers = run.scan_layers if scan else run.layers
            return (layers(block, shards, x).astype(jnp.float32) ** 2).mean()

        return state, jax.tree.map(lambda s, g: s - 1e-3 * g, shards, jax.grad(loss)(shards))

    def placed(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, P("data")))

    def cut(kind: Any) -> Any:
        return placed(8 * LAYERS, kind.size // 8) if scan else placed(kind.size)

    params = jax.tree.map(cut, like)
    shards = params if scan else [params] * LAYERS
    compiled = jax.jit(lambda *args: train({}, *args)[1], donate_argnums=0).lower(
        shards, placed(8 * ROWS, WIDTH)
    )
    text = compiled.compile().as_text()
    assert not re.search(r" all-reduce(-start)?\(", text)
    audit = audit_text(text)
    kinds = [collective.kind for collective in audit.collectives]
    assert set(kinds) == {"all_gather", "reduce_scatter"}
    # The first gather has nothing before it, and the last scatter nothing behind it.
    assert audit.covered >= (0.8 if not scan else 0.5)
