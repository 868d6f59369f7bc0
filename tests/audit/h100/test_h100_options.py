"""The effects of the options that `run.jit` passes, on steps compiled ahead of time for H100."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import commplan
from commplan.lowering.audit import Audit, target
from commplan.lowering.jax.aot import devices

sys.path.insert(0, str(Path(__file__).parents[1]))
import steps

WIDTH, ROWS = 2048, 8 * 4096
THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"
LADDER = """plan ladder
axis node = 4
axis gpu = 8
input grads : f32[1048576] partial node, gpu
each step {
    grads = reduce grads over node, gpu by mean via hierarchical(gpu = native, node = ring)
    output grads
}
"""


def audited(by: str, **options: Any) -> Audit:
    """The audit of a step of four buckets of 17 MB with one more sum. `by`: `run.jit` or `jax.jit`."""
    mesh = Mesh(devices(target("h100:1x8")).reshape(8), ("data",), axis_types=(AxisType.Auto,))
    plan = commplan.loads(steps.PLAN.replace("8 KiB", "20 MiB"), "audited.plan")
    program = plan.compile(mesh, {"grads": steps.shapes(WIDTH)})
    run = program.bind(mesh)

    @run.spmd(params="same", x="split data")
    def train(state: Any, params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(steps.loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        total = lax.psum(value, "data")
        return state, jax.tree.map(lambda w, g: w - total * g, params, out.grads)

    step = run.jit(train, **options) if by == "run.jit" else jax.jit(train, **options)
    return program.audit(step, *steps.arguments(mesh, WIDTH, ROWS))


def kind(by: str, **options: Any) -> str:
    """How the compiled step differs from the plan: an `extra` sum, or one `merged` with a bucket."""
    (difference,) = audited(by, **options).differences
    return difference.kind


def test_what_the_step_sums_itself_stays_out_of_the_plans_buckets() -> None:
    assert (kind("run.jit"), kind("jax.jit")) == ("extra", "merged")


def test_the_users_options_go_before_the_plans() -> None:
    none = {"xla_disable_hlo_passes": "none", THRESHOLD: 1 << 30}  # then only size keeps a bucket apart
    assert kind("run.jit", compiler_options=none) == "merged"


def test_the_arrays_of_a_bucket_are_reduced_as_they_are() -> None:
    by_run, by_jax = (audited(by) for by in ("run.jit", "jax.jit"))
    assert all(row.expected == "" or row.cause == "" for row in by_run.rows), str(by_run)
    assert by_jax.differences[0].kind == "merged"


def test_the_plans_options_go_before_flags_of_the_process() -> None:
    flags = f"--{THRESHOLD}={1 << 30}"
    script = "import warnings\nwarnings.simplefilter('always')\nfrom test_h100_options import kind\n"
    script += "print(kind('run.jit'), kind('jax.jit'))"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=250,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.stdout.split() == ["extra", "merged"]
    assert f"warning[CP0858]: XLA_FLAGS has {flags}" in done.stderr


def test_rounds_move_in_memory_that_nccl_makes_symmetric() -> None:
    mesh = Mesh(devices(target("h100:4x8")), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    program = commplan.loads(LADDER).compile(mesh)
    run = program.bind(mesh)

    @run.spmd(x="split node, gpu", returns="same")
    def step(state: Any, x: Any) -> Any:
        out, state = run.step(state, grads=x.reshape(-1))
        return state, out.grads

    x = jax.ShapeDtypeStruct((32 * 1048576,), "float32")
    with_options = run.jit(step).lower({}, x).compile().as_text()
    space = "S(7)" if jax.__version_info__ >= (0, 12) else "S(1)"
    assert "collective-permute" in with_options and space in with_options
    assert not re.search(r"\bS\(\d", jax.jit(step).lower({}, x).compile().as_text())


def test_no_round_of_a_bucket_is_joined_with_one_of_the_next() -> None:
    """XLA makes one of two permutes that nothing orders, and of two rings of seven and seven rounds 27."""
    mesh = Mesh(devices(target("h100:1x8")).reshape(8), ("gpu",), axis_types=(AxisType.Auto,))
    grads = {name: jax.ShapeDtypeStruct((4194304,), "float32") for name in "ab"}
    plan = LADDER.replace("axis node = 4\n", "").replace("node, gpu", "gpu").replace("f32[1048576]", "tree")
    via = "via ring { bucket = 16 MiB, overlap = backward }"
    plan = plan.replace("via hierarchical(gpu = native, node = ring)", via)
    program = commplan.loads(plan).compile(mesh, {"grads": grads})
    run = program.bind(mesh)

    @run.spmd(x="split gpu", y="split gpu", returns="same")
    def step(state: Any, x: Any, y: Any) -> Any:
        out, state = run.step(state, grads={"a": x.reshape(-1), "b": y.reshape(-1)})
        return state, out.grads

    whole = jax.ShapeDtypeStruct((8 * 4194304,), "float32")
    result = program.audit(run.jit(step), {}, whole, whole)
    assert result.ok and sum(row.count for row in result.rows) == 28, str(result)


@pytest.mark.parametrize("via", ["native", "hierarchical(gpu = native, node = ring)"])
def test_every_option_is_known(via: str) -> None:
    options = commplan.loads(LADDER.replace("hierarchical(gpu = native, node = ring)", via)).compile()
    for name, value in options.compiler_options("h100:4x8").items():
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
