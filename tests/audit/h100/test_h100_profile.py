"""Steps compiled ahead of time with a profile of their estimated times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import commplan
from commplan.lowering.audit import Audit, target
from commplan.lowering.gpu.profile import profile
from commplan.lowering.jax.aot import devices

sys.path.insert(0, str(Path(__file__).parents[1]))
import steps

WIDTH, ROWS = 2048, 32 * 4096
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
# XLA then also verifies that no instruction is renamed; since JAX 0.11 its own pass renames
# collectives that it makes synchronous.
STRICT = {
    "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_ERROR",
    "xla_disable_hlo_passes": "async-to-sync-converter",
}


def step_of(mesh: Any, **options: Any) -> tuple[Any, Any]:
    """A program, and a step with one more sum between the sums of its four gradients."""
    text = steps.PLAN.replace("8 KiB", "20 MiB").replace("data = 8", "data = 32")
    program = commplan.loads(text, "audited.plan").compile(mesh, {"grads": steps.shapes(WIDTH)})
    run = program.bind(mesh)

    @run.spmd(params="same", x="split data")
    def train(state: Any, params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(steps.loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        total = lax.psum(value, "data")
        return state, jax.tree.map(lambda w, g: w - total * g, params, out.grads)

    # One at a time: with the plan's own limit nothing is left for a profile to gain.
    return program, run.jit(train, compiler_options={OVERLAP: 1}, **options)


@pytest.fixture(name="mesh")
def _mesh() -> Any:
    return Mesh(devices(target("h100:4x8")).reshape(32), ("data",), axis_types=(AxisType.Auto,))


def test_collectives_move_to_where_they_hide(mesh: Any) -> None:
    program, step = step_of(mesh)
    arguments = steps.arguments(mesh, WIDTH, ROWS)
    result: Audit = program.audit(step, *arguments, machine="h100:4x8", pgle=True)
    assert result.profiled is not None and result.estimate is not None
    after = result.profiled.audit
    assert after.estimate is not None and after.estimate.exposed < result.estimate.exposed
    assert any(shift.moved for shift in result.profiled.shifts)
    assert [row.expected for row in after.rows if row.cause] == [""]  # the step's own sum, as without


def test_run_jit_compiles_with_the_profile(mesh: Any) -> None:
    arguments = steps.arguments(mesh, WIDTH, ROWS)
    program, usual = step_of(mesh)
    without: Audit = program.audit(usual, *arguments, machine="h100:4x8", pgle=True)
    _, step = step_of(mesh, pgle="h100:4x8")
    result: Audit = program.audit(step, *arguments, machine="h100:4x8")
    assert without.profiled is not None and result.pgle and not without.pgle
    assert result.estimate == without.profiled.audit.estimate
    assert [d.kind for d in result.differences] == [d.kind for d in without.differences]
    assert str(result).splitlines()[0].endswith("compiled by run.jit with a profile (pgle)")


@pytest.mark.parametrize("scanned", [False, True])
def test_the_profile_has_every_instruction_that_the_scheduler_asks_for(mesh: Any, *, scanned: bool) -> None:
    _, planned = step_of(mesh)

    def looped(state: Any, params: Any, x: Any) -> Any:
        return lax.scan(lambda carry, _: (planned(state, carry, x)[1], None), params, length=3)

    lowered = jax.jit(looped if scanned else planned).lower(*steps.arguments(mesh, WIDTH, ROWS))
    times = profile(lowered.compile().as_text(), target("h100:4x8").machine)
    lowered.compile(compiler_options={**STRICT, "fdo_profile": times})
    lines = [line for line in times.splitlines() if b"gemm" not in line]
    with pytest.raises(Exception, match="missing instructions"):
        lowered.compile(compiler_options={**STRICT, "fdo_profile": b"\n".join(lines)})
