"""Scanned layers compiled ahead of time for 4 x 8 H100: the tap's collectives are inside the loop's body."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.lowering.audit import audit_text, target
from commplan.lowering.gpu.estimate import estimate
from commplan.lowering.jax.aot import devices

PLAN = """plan scanned
axis node = 4
axis gpu = 8
input params : tree
input grads : tree partial node, gpu
each step {
    grads = reduce grads over node, gpu by mean VIA
    output grads
}
"""
LAYERS = {
    "v": jax.ShapeDtypeStruct((6, 1024, 1024), "bfloat16"),
    "w": jax.ShapeDtypeStruct((6, 1024, 1024), "bfloat16"),
    "b": jax.ShapeDtypeStruct((6, 1024), "float32"),
}


def compiled(by: str, rows: int, via: str = "via native") -> str:
    """The text of the scanned step with `rows` rows of a device. by: `jax.jit` or `run.jit`."""
    mesh = Mesh(devices(target("h100:4x8")), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    plan = commplan.loads(PLAN.replace("VIA", via))
    run = plan.compile(mesh, shapes={"params": LAYERS, "grads": LAYERS}).bind(mesh)

    def loss(layers: Any, x: Any) -> Any:
        def body(y: Any, layer: Any) -> tuple[Any, None]:
            layer = run.tap(layer)
            y = jnp.tanh(y @ layer["v"])
            return jnp.tanh(y @ layer["w"] + layer["b"].astype(y.dtype)), None

        y, _ = lax.scan(body, x, layers)
        return (y.astype(jnp.float32) ** 2).mean()

    @run.spmd(params="params", x="split node, gpu", returns=("params",))
    def step(state: Any, params: Any, x: Any) -> Any:
        return state, jax.grad(loss)(params, x)

    def placed(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = {name: placed(leaf, P()) for name, leaf in LAYERS.items()}
    x = placed(jax.ShapeDtypeStruct((32 * rows, 1024), "bfloat16"), P(("node", "gpu")))
    jit = jax.jit if by == "jax.jit" else run.jit
    return jit(step).lower({}, params, x).compile().as_text()


def test_the_tap_reduces_under_the_next_layers_matrix_product() -> None:
    text = compiled("jax.jit", 8)
    bodies = [part for part in text.split("\n\n") if "all-reduce-start(" in part]
    assert len(bodies) == 1
    assert not bodies[0].startswith("ENTRY")
    # The weights' gradient travels as bf16, under the product that makes the next layer's cotangent.
    lines = [line for line in bodies[0].splitlines() if re.search(r"all-reduce-(start|done)|gemm", line)]
    start = next(i for i, line in enumerate(lines) if "bf16[1048576]" in line and "all-reduce-start(" in line)
    done = next(i for i, line in enumerate(lines) if "bf16[1048576]" in line and "all-reduce-done(" in line)
    assert any("gemm" in line for line in lines[start + 1 : done])


def test_under_run_jit_a_layers_sum_has_the_next_round_to_hide_under() -> None:
    machine = target("h100:4x8").machine
    steps = {by: audit_text(compiled(by, 4096)) for by in ("jax.jit", "run.jit")}
    waiting = {by: estimate(step, machine).exposed for by, step in steps.items()}
    assert waiting["run.jit"] < waiting["jax.jit"]
    sums = {by: sum(step.trips(c) for c in step.collectives) for by, step in steps.items()}
    assert sums["run.jit"] == sums["jax.jit"]  # one for each layer, with that of the last outside the loop
    (loop,) = {c.loops for c in steps["jax.jit"].collectives}
    assert loop and () in {c.loops for c in steps["run.jit"].collectives}


def test_levels_of_a_layers_large_gradients_run_at_once() -> None:
    text = compiled("run.jit", 4096, "via hierarchical(gpu, node)")
    step = audit_text(text)
    large = [c for c in step.collectives if c.loops and c.dtypes == ("bf16",)]
    kinds = [c.kind for c in large]
    levels = ("reduce_scatter", "all_reduce", "all_gather")
    assert len(kinds) == 6 and all(kinds.count(kind) == 2 for kind in levels)  # none is packed with another
    assert all(not c.synchronous and step.hidden(c) for c in large)
    first, second = (c for c in large if c.kind == "all_reduce")
    gather = next(c for c in large if c.kind == "all_gather")
    # One is gathered within the nodes while the other is still summed between them.
    assert first.start < second.start < first.done < gather.start < second.done
