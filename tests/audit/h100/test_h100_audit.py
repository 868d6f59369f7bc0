"""Audits of steps compiled ahead of time for 8 H100: which collectives XLA combines, and which it must
not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.cli import main
from commplan.lowering.audit import Audit, target
from commplan.lowering.jax.aot import mesh_on

sys.path.insert(0, str(Path(__file__).parents[1]))
import steps
import twins

WIDTH, ROWS = 2048, 8 * 4096
TARGET = target("h100:1x8")
LARGEST = {"xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30}


@pytest.fixture(scope="module")
def mesh() -> Any:
    return mesh_on(TARGET, {"data": 8})


def audited(mesh: Any, passes: str | None = None, *, extra: bool = False) -> Audit:
    """The audit of a step of four layers in buckets of a layer, where XLA may combine a gibibyte."""
    plan = commplan.loads(steps.PLAN.replace("8 KiB", "20 MiB"), "audited.plan")
    shapes = {"grads": steps.shapes(WIDTH)}
    run = plan.compile(mesh, shapes, passes=passes).bind(mesh)

    @run.spmd(params="same", x="split data")
    def train(state: Any, params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(steps.loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        total = lax.psum(value, "data") if extra else 0.1
        return state, jax.tree.map(lambda w, g: w - total * g, params, out.grads)

    step = jax.jit(train, compiler_options=LARGEST)
    arguments = steps.arguments(mesh, WIDTH, ROWS)
    return plan.compile(mesh, shapes).audit(step, *arguments, machine=TARGET.machine)


def test_the_plans_buckets_are_not_combined(mesh: Any) -> None:
    report = audited(mesh)
    assert report.ok, report
    assert report.estimate is not None and len(report.estimate.waits) == 4
    (row,) = report.rows
    assert row.count == 4 and row.seconds is not None and row.exposed is not None
    assert 0 < row.exposed < row.seconds
    assert "300 GB/s on the bus" in str(report)


def test_buckets_that_nothing_holds_apart_are(mesh: Any) -> None:
    (difference,) = audited(mesh, "bucket").differences
    assert (difference.kind, difference.cause) == ("merged", "combined")
    assert difference.reason == "XLA combined 4 collectives of line 8"


def test_a_sum_of_the_steps_own_is_combined_with_one_and_named(mesh: Any) -> None:
    (difference,) = audited(mesh, extra=True).differences
    assert (difference.cause, difference.is_additional) == ("combined", True)
    assert "1 collective of line 8 with the step's own `psum` at" in difference.reason
    assert "test_h100_audit.py:" in difference.reason


@pytest.mark.parametrize(("width", "dtype"), [(WIDTH, "float32"), (256, "bfloat16")])
def test_a_layer_tapped_in_a_scan_is_in_no_other_loop(mesh: Any, width: int, dtype: str) -> None:
    layer = {"b": jax.ShapeDtypeStruct((width,), "float32"), "w": jax.ShapeDtypeStruct((width, width), dtype)}
    text = steps.PLAN.replace("{ bucket = 8 KiB, overlap = backward }", "{ bucket = 20 MiB }")
    run = commplan.loads(text).compile(mesh, {"grads": layer}).bind(mesh)

    @run.spmd(params="same", x="split data")
    def train(state: Any, params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            def body(y: Any, layer: Any) -> tuple[Any, None]:
                tapped = run.tap(layer)
                return jax.nn.relu(y @ tapped["w"] + tapped["b"].astype(dtype)), None

            return (lax.scan(body, x, params)[0] ** 2).mean()

        return state, twins.sgd(params, jax.grad(loss)(params))

    same = NamedSharding(mesh, P())
    params = {
        name: jax.ShapeDtypeStruct((6, *leaf.shape), leaf.dtype, sharding=same)
        for name, leaf in layer.items()
    }
    x = jax.ShapeDtypeStruct((ROWS, width), dtype, sharding=NamedSharding(mesh, P("data")))
    report = run.program.audit(train, {}, params, x)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["h100:1x8", "h200:1x8", "b200:1x8", "a100:2x4"])
def test_phases_alone(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, shapes = tmp_path / "audited.plan", tmp_path / "shapes.json"
    plan.write_text(steps.PLAN)
    leaves = {name: {"shape": list(leaf.shape), "dtype": "f32"} for name, leaf in steps.shapes().items()}
    shapes.write_text(json.dumps({"grads": leaves}))
    words = ["audit", str(plan), "--shapes", str(shapes), "--target", name, "--format", "json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["devices"], document["ok"]) == (name, True)
    assert [step["name"] for step in document["steps"]] == ["phase step", "phase every_2"]
    assert document["steps"][0]["estimate"]["exposed"] > 0


def test_explain_simulate_and_audit_say_the_same_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, shapes = tmp_path / "audited.plan", tmp_path / "shapes.json"
    plan.write_text(steps.PLAN)
    leaves = {name: {"shape": list(leaf.shape), "dtype": "f32"} for name, leaf in steps.shapes().items()}
    shapes.write_text(json.dumps({"grads": leaves}))
    topology = Path(__file__).parents[3] / "examples" / "topologies" / "h100_64.toml"
    words = [str(plan), "--shapes", str(shapes), "--topology", str(topology), "--format", "json"]
    words += ["--step", f"{Path(__file__).parents[1] / 'steps.py'}:planned", "--target", "h100:1x8"]
    documents: dict[str, dict[str, Any]] = {}
    for verb in ("explain", "simulate", "audit"):
        assert main([verb, *words]) == 0
        documents[verb] = json.loads(capsys.readouterr().out)
    planned, simulated = documents["audit"]["planned"][0], documents["simulate"]["phases"][0]
    (cost,), explained = documents["explain"]["steps"], documents["explain"]["phases"][0]["times"]
    for name in ("alone", "computation", "exposed"):
        assert planned[name] == simulated[name] == explained[name]
    (step,) = documents["audit"]["steps"]
    assert step["estimate"]["computation"] - cost["after"] == cost["computation"] == planned["computation"]
    assert step["machine"]["links"].startswith("links of topology `h100_64`")
    took = {op["alone"] for op in simulated["ops"] if op["algorithm"]}
    assert {row["seconds"] / row["count"] for row in step["rows"]} == took
