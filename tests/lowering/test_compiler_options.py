"""The XLA options for compiling a plan unchanged, and the flags in XLA_FLAGS that would undo it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import commplan
from commplan.cli import main
from commplan.diagnostics import CommplanError
from commplan.lowering.jax import _jit
from commplan.lowering.jax.compiler_options import accepted, as_installed, compiler_options, overriding_flags

PLAN = """plan p
axis node = 2
axis gpu = 4
input grads : tree partial node, gpu
each step {
    grads = reduce grads over node, gpu by sum VIA { bucket = 8 KiB }
    output grads
}
"""
SHAPES = {"grads": {f"w{i}": jax.ShapeDtypeStruct((1024,), "float32") for i in range(4)}}
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
REDUCE = "xla_gpu_all_reduce_combine_threshold_bytes"
GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
PIPELINED, ON = "xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON"
FORMERLY = "xla_gpu_enable_pipelined_all_reduce"
PASSES, SLICING = "xla_disable_hlo_passes", "dynamic-slice-copy-fusion-async-wrapper"
PERMUTE = "xla_gpu_collective_permute_mode"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def program(via: str = "", **axes: int) -> Any:
    text = PLAN.replace("VIA", via)
    for name, size in axes.items():
        text = text.replace(f"axis {name} = {4 if name == 'gpu' else 2}", f"axis {name} = {size}")
    return commplan.loads(text).compile(shapes=SHAPES)


def wanted(program: Any, target: str = "gpu") -> dict[str, Any]:
    return accepted(compiler_options(program.schedule, target))


def test_thresholds_lie_below_what_the_plan_sends() -> None:
    common = {SCHEDULER: True, OVERLAP: 8}
    flat = wanted(program("via native"))
    expected = {PIPELINED: ON, PASSES: f"{SLICING},all-reduce-contiguous"}
    assert flat == common | expected | {REDUCE: 8192}
    levels = wanted(program("via hierarchical(gpu = native, node = native)"), "h100:2x4")
    assert levels == common | {REDUCE: 2047, SCATTER: 2047, GATHER: 2047, PASSES: SLICING}


ZERO = """plan zero
axis node = 2
axis gpu = 4
input grads : tree partial node, gpu
input loss : f32 partial node, gpu
each step {
    grads = scatter grads over gpu by mean
    grads = reduce grads over node by mean
    fresh = gather grads over gpu
    loss = reduce loss over node, gpu by mean
    output fresh, loss
}
"""


@pytest.mark.parametrize(("hybrid", "overlap"), [(False, None), (True, 3)])
def test_scattered_gradients_beside_a_loss_are_no_levels_of_all_reduces(
    hybrid: bool, overlap: int | None
) -> None:
    text = ZERO
    if not hybrid:
        text = text.replace("axis node = 2\n", "").replace("node, gpu", "gpu")
        text = text.replace("    grads = reduce grads over node by mean\n", "")
    options = wanted(commplan.loads(text).compile(shapes=SHAPES))
    assert options[PIPELINED] == ON and options.get(OVERLAP) == overlap


def test_rounds_of_a_program_ask_for_symmetric_memory() -> None:
    options = wanted(program("via hierarchical(gpu = native, node = ring)"), "cuda")
    assert options[PERMUTE] == "COLLECTIVES_SYMMETRIC_MEMORY"
    assert REDUCE not in options and PIPELINED not in options and options[OVERLAP] == 2
    assert PERMUTE not in wanted(program("via native"))


def test_nothing_is_said_where_nothing_is_sent_or_compiled_by_xla_for_gpus() -> None:
    assert program("via native").compiler_options("cpu") == {}
    assert program("", node=1, gpu=1).compiler_options("gpu") == {}
    with pytest.raises(CommplanError, match="CP1150"):
        program().compiler_options("tpu")


def test_every_option_says_why() -> None:
    options = compiler_options(program("via hierarchical(gpu = native, node = ring)").schedule, "gpu")
    assert all(len(option.why) > 20 for option in options)
    assert len({option.name for option in options}) == len(options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"--{REDUCE}=1073741824", "XLA may combine several collectives of up to 1073741824 bytes"),
        ("--xla_gpu_all_reduce_blueconnect_num_devices_per_host=8", "XLA splits all-reduces again"),
        ("--xla_gpu_disable_async_collectives=ALLREDUCE", "ALLREDUCE block until they are complete"),
        (f"--{SCHEDULER}=false --xla_dump_to=x", "collectives do not overlap with computation"),
        (f"--{FORMERLY}=false", "does not overlap with the next iteration"),
        (f"--{PIPELINED}=default", "does not overlap with the next iteration"),
        (f"--{OVERLAP}=1", "at most 1 of the plan's collectives run at the same time"),
    ],
)
def test_flags_that_undo_the_plan_are_named(flags: str, message: str) -> None:
    (warning,) = overriding_flags(compiler_options(program("via native").schedule, "gpu"), flags)
    assert str(warning).startswith("warning[CP0858]: XLA_FLAGS has --xla_gpu_") and message in str(warning)


@pytest.mark.parametrize(
    "flags",
    [
        *("", "-x", f"--{OVERLAP}=8", f"--{REDUCE}=100", f"--{GATHER}=1073741824", f"--{SCHEDULER}=true"),
        *(f"--{FORMERLY}", f"--{PIPELINED}=on"),
    ],
)
def test_other_flags_are_not(flags: str) -> None:
    assert overriding_flags(compiler_options(program("via native").schedule, "gpu"), flags) == ()


def test_flags_do_not_matter_where_nothing_is_sent() -> None:
    assert overriding_flags((), f"--{REDUCE}=1073741824 --xla_gpu_disable_async_collectives=ALLREDUCE") == ()


def test_explain_lists_the_options(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "p.plan"
    plan.write_text(PLAN.replace("VIA", "via native").replace(": tree", ": f32[4096]"))
    assert main(["explain", str(plan), "--target", "gpu"]) == 0
    output = capsys.readouterr().out
    assert "options of the compiler for gpu, which run.jit passes" in output
    assert f"  {REDUCE} = 16384: a bucket is one all-reduce" in output
    assert main(["explain", str(plan)]) == 0
    assert "options of the compiler" not in capsys.readouterr().out


def test_a_version_gets_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    options = compiler_options(program("via native").schedule, "gpu")
    names = {option.name for option in options}
    for unknown, known_by in [
        (set[str](), {PIPELINED: ON}),
        ({PIPELINED}, {FORMERLY: True}),
        ({PIPELINED, FORMERLY}, dict[str, Any]()),
    ]:
        monkeypatch.setattr(_jit, "is_known", lambda name, _, unknown=unknown: name not in unknown)
        installed = accepted(as_installed(options))
        assert set(installed) == names - {PIPELINED} | set(known_by) and known_by.items() <= installed.items()
        assert program("via native").compiler_options("gpu") == installed


def test_without_jax_every_option_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    options = compiler_options(program("via native").schedule, "gpu")
    assert as_installed(options) == options and len(accepted(options)) == len(options)


def test_explain_lists_what_the_compiler_does_not_know(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "p.plan"
    plan.write_text(PLAN.replace("VIA", "via native").replace(": tree", ": f32[4096]"))
    monkeypatch.setattr(_jit, "is_known", lambda name, _: name != OVERLAP)
    assert main(["explain", str(plan), "--target", "gpu"]) == 0
    passed, _, left_out = capsys.readouterr().out.partition("does not support them\n")
    assert f"  {REDUCE} = 16384" in passed and OVERLAP not in passed and f"  {OVERLAP} = 8: all" in left_out
    assert main(["explain", str(plan), "--target", "gpu", "--format", "json"]) == 0
    is_known = {
        each["name"]: each["known"] for each in json.loads(capsys.readouterr().out)["compiler_options"]
    }
    assert is_known.pop(OVERLAP) is False and set(is_known.values()) == {True}


UNSTARTED = """\
import jax
from jax._src import xla_bridge
from commplan.lowering.jax._jit import is_known
print(is_known("xla_gpu_enable_latency_hiding_scheduler", True), is_known("xla_no_such_option", True))
print(xla_bridge.backends_are_initialized(), len(jax.devices()) > 0)
print(is_known("xla_gpu_enable_latency_hiding_scheduler", True), is_known("xla_no_such_option", True))
"""


def test_a_query_starts_no_backend() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNSTARTED], capture_output=True, text=True, check=True, timeout=99
    )
    assert done.stdout.split() == ["True", "False", "False", "True", "True", "False"]


@pytest.mark.parametrize("via", ["native", "hierarchical(gpu = native, node = ring)"])
def test_the_installed_compiler_knows_every_option(via: str) -> None:
    options = as_installed(compiler_options(program(f"via {via}").schedule, "gpu"))
    unknown = {option.name for option in options if not option.known}
    assert options and unknown == (
        {PERMUTE} & {o.name for o in options} if jax.__version_info__ < (0, 10, 2) else set()
    )


def test_steps_with_options_run_inside_other_functions_too() -> None:
    calls: list[Any] = []

    def body(x: Any, n: int) -> Any:
        calls.append(n)
        return {"y": jnp.sin(x) * n}

    step = _jit.jit(body, {SCHEDULER: True}, static_argnames="n")
    x = np.arange(4.0, dtype=np.float32)
    np.testing.assert_allclose(step(x, n=2)["y"], 2 * np.sin(x), rtol=1e-6)
    assert step(x, n=2)["y"].shape == (4,) and calls == [2]
    inside = jax.jit(lambda x: step(x, n=3)["y"].sum())
    np.testing.assert_allclose(jax.grad(inside)(x), 3 * np.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda v: step(v, n=2)["y"])(x), 2 * np.sin(x), rtol=1e-6)
    compiled = step.lower(x, n=2).compile()
    np.testing.assert_allclose(compiled(x)["y"], 2 * np.sin(x), rtol=1e-6)
    with pytest.raises(Exception, match="xla_no_such_option"):
        _jit.jit(body, {"xla_no_such_option": 1}, static_argnames="n")(x, n=2)
