"""The audit of steps that run layers on sharded weights: their gathers and scatters are planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.lowering.audit.report import Audit, audit
from commplan.lowering.hlo.step import StepText
from commplan.lowering.jax.aot import compile_step

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
WIDTH = 16
LIKE = {
    "w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    "b": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
}


def block(weights: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ weights["w"] + weights["b"])


def compiled(depth: int, *, scan: bool = False, plan: str = PLAN) -> tuple[Any, StepText, Audit]:
    """The program of the plan, and a step of `depth` layers as text and audited."""
    mesh = jax.make_mesh((8,), ("data",))
    run = commplan.loads(plan).compile(mesh, shapes={"weights": LIKE, "grads": LIKE}).bind(mesh)
    layers = run.scan_layers if scan else run.layers

    @jax.jit
    @run.spmd(shards="split data", x="split data")
    def train(state: Any, shards: Any, x: Any) -> Any:
        grads = jax.grad(lambda shards: (layers(block, shards, x) ** 2).mean())(shards)
        return state, jax.tree.map(lambda s, g: s - 0.1 * g, shards, grads)

    def placed(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def cut(kind: Any) -> Any:
        return placed(8 * depth, kind.size // 8) if scan else placed(kind.size)

    params = jax.tree.map(cut, LIKE)
    arguments = ({}, params if scan else [params] * depth, placed(64, WIDTH))
    return run.program, compile_step(train, *arguments), run.program.audit(train, *arguments)


@pytest.mark.parametrize("scan", [False, True])
def test_layers_are_as_planned(scan: bool) -> None:
    _, _, report = compiled(4, scan=scan)
    assert report.ok, report
    lines = {(row.phase, row.line): 0 for row in report.rows}
    for row in report.rows:
        lines[row.phase, row.line] += row.count
    if not scan:  # weights and biases; for the backward pass the last layer's are kept, the first one's not
        assert lines == {("step", 6): 2 * 4 + 2, ("step", 7): 2 * 4}  # needed, and no bias


def test_an_all_to_all_of_several_operands_is_told_by_its_own_name() -> None:
    """XLA:CPU returns one array for each rank, and behind a derivative the op that unpacks them has no
    name."""
    plan = PLAN.replace("by mean", "by mean { wire = bf16, accumulate = f32 }")
    _, text, report = compiled(4, plan=plan)
    assert "all-to-all(" in text.compiled
    assert report.ok, report


def test_layers_that_xla_left_out_are_missing() -> None:
    program, fewer, _ = compiled(3)
    _, more, _ = compiled(4)
    report = audit(program.schedule, StepText(fewer.compiled, more.traced, layers=more.layers))
    assert [(d.kind, d.cause) for d in report.differences] == [("missing", "folded")] * 5
    assert {d.expected[0].kind for d in report.differences} == {"all_gather", "reduce_scatter"}


def test_layers_of_another_plan_are_none_of_its_own() -> None:
    program, text, _ = compiled(2)
    report = audit(program.schedule, StepText(*text[:3]))
    assert "repeated" in {d.cause for d in report.differences}
