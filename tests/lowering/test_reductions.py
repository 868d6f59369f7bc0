"""The rules of docs/reductions.md for each reduction hold on devices and under MPI, by every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import campaign, mpirun, reductions
from support.embedding import mesh_of
from support.reduction_statements import STATEMENTS

from commplan.ir.types import DType
from commplan.lowering.jax import ops
from commplan.runtime.param_server.reductions import pulled

SYSTEMATIC = list(reductions.systematic((2, 2)))
SIZES = ((2, 2), (1, 3), (4, 2))


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.__name__)
def test_on_devices(statement: Callable[[Any], None]) -> None:
    statement(mesh_of(node=1, gpu=2))


def test_under_mpi() -> None:
    mpirun.needs_mpi()
    program = "from mpi4py import MPI\nfrom support import reduction_statements\n"
    program += "reduction_statements.check_all(MPI.COMM_WORLD)\n"
    done = mpirun.started(mpirun.command(2, program))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", campaign.parameters(SYSTEMATIC[::25], SYSTEMATIC[1::25]), ids=str)
def test_systematic_cases(case: reductions.Case) -> None:
    reductions.check(case, mesh_of(**case.axes))


@pytest.mark.parametrize("seed", campaign.parameters(range(6), range(6, 60)))
def test_random_cases(seed: int) -> None:
    case = reductions.drawn(seed, SIZES)
    reductions.check(case, mesh_of(**case.axes))


@pytest.mark.parametrize(("dtype", "ranks"), [("float16", 70_000), ("bfloat16", 257), ("float32", 70_000)])
def test_a_mean_divides_by_the_true_number_of_ranks(dtype: str, ranks: int) -> None:
    """More than 65,519 are infinite in f16, and 257 are 256 in bf16."""
    value = np.asarray(ops.scale(jnp.asarray([60000], dtype), "div", float(ranks)))
    exact = float(jnp.asarray(60000, dtype)) / ranks
    assert value.tolist() == [jnp.asarray(exact, dtype)]


@pytest.mark.parametrize(("wire", "dtype"), [(DType.F16, np.float16), (DType.BF16, ml_dtypes.bfloat16)])
def test_the_pull_of_elastic_averaging_is_rounded_once(wire: DType, dtype: Any) -> None:
    """On workers and on servers: f16 has no 1e-8, the product of these rates."""
    member, center, rate = np.asarray([40000, 7], dtype), np.asarray([0, 7], dtype), np.asarray(1e-4, "f4")
    expected = [np.asarray(float(member[0]) * 1e-8, dtype), 0]
    assert np.asarray(ops.pull(jnp.asarray(member), jnp.asarray(center), rate, rate)).tolist() == expected
    sent = pulled(member, center, rate, rate, wire)
    assert sent.tolist() == expected
    assert center.tolist() == [expected[0], 7]
