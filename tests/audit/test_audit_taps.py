"""Taps of large and small leaves, as GPUs reduce them: each large one separately, overlapping computation."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import commplan
from commplan.lowering.audit import StepText, audit
from commplan.lowering.jax import aot
from commplan.lowering.jax.collectives.lax_backend import LaxBackend

PLAN = """plan tapped
axis node = 2
axis gpu = 2
input params : tree
input grads : tree partial node, gpu
each step {
    grads = reduce grads over node, gpu by mean VIA
    output grads
}
"""
WIDE = 512  # f32[512, 512] is 1 MiB
LAYER = {name: jax.ShapeDtypeStruct((WIDE, WIDE), "float32") for name in "vw"}
LAYER["b"] = jax.ShapeDtypeStruct((WIDE,), "float32")
LAYER["odd"] = jax.ShapeDtypeStruct((5,), "float32")  # `b` and this have 517 elements


@pytest.mark.parametrize(
    ("via", "taps", "platform", "message"),
    [
        ("native", 1, "gpu", "3 collectives as planned"),
        ("hierarchical(gpu, node)", 1, "gpu", "9 collectives as planned"),
        # The devices are CPUs, where bf16 moves as u16.
        ("hierarchical(gpu, node) { wire = bf16, accumulate = f32 }", 1, "cpu", "12 collectives as planned"),
        ("native", 2, "gpu", "3 collectives as planned, 3 differences"),
    ],
)
def test_a_tap_has_collectives_of_its_own(
    via: str, taps: int, platform: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaxBackend, "asynchronous", True)
    monkeypatch.setattr(LaxBackend, "variadic", False)
    monkeypatch.setattr(LaxBackend, "combiner_scope", lambda *_: contextlib.nullcontext())
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    text = PLAN.replace("VIA", f"via {via}")
    program = commplan.loads(text).compile(mesh, shapes={"params": LAYER, "grads": LAYER})
    run = program.bind(mesh)

    def loss(layer: Any, x: Any) -> Any:
        for _ in range(taps):
            tapped = run.tap(layer)
            x = jnp.tanh(x @ tapped["v"] @ tapped["w"] + tapped["b"]) * tapped["odd"].sum()
        return lax.square(x).mean()

    @run.spmd(params="params", x="split node, gpu", returns=("params",))
    def step(state: Any, params: Any, x: Any) -> Any:
        return state, jax.grad(loss)(params, x)

    x = jax.ShapeDtypeStruct((16, WIDE), "float32")
    traced = aot.compile_step(step, {}, LAYER, x).traced  # XLA for CPUs makes one all-reduce of several
    report = str(audit(program.schedule, StepText(traced, traced, platform)))
    assert report.startswith(f"plan tapped: {message}\n"), report
