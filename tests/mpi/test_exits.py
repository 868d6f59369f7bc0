"""Ranks that end with steps in flight end well; one that ends before the others leaves nobody waiting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import mpirun

mpirun.needs_mpi()

ULFM = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]
EARLY = """
import sys
import jax, numpy as np
from mpi4py import MPI
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec
algorithm, form, rest = sys.argv[1:]
channel = Channel(MPI.COMM_WORLD)
spec = Spec("all_reduce", algorithm=Algorithm(algorithm), form=form, where="line 6 of x.plan waits for it")
step = jax.jit(lambda x, token: channel.run(x, spec, token)[0])
ys = []
try:
    for _ in range(4 if MPI.COMM_WORLD.rank == 1 else 8):
        ys.append(step(np.ones(300_000, np.float32), channel.token()))
    if rest == "awaited":
        jax.block_until_ready(ys)
except (ValueError, RuntimeError) as error:
    print("told:", error, flush=True)
if MPI.COMM_WORLD.rank == 1 and rest == "finalized":
    MPI.Finalize()
"""
GONE = "the program has ended on rank 1; line 6 of x.plan waits for it"


@pytest.mark.parametrize(("count", "how"), [(3, ()), (1, ("--ulfm",)), (1, ("--elements", "1000"))])
def test_steps_in_flight_end_before_mpi_does(count: int, how: tuple[str, ...]):
    done = subprocess.run(
        [sys.executable, "-m", "bench.exits", "--count", str(count), "--json", *how],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and found["runs"] == count


def early(algorithm: str, form: str, rest: str, options: list[str]) -> subprocess.CompletedProcess[str]:
    command = mpirun.command(3, EARLY, algorithm, form, rest)
    return mpirun.started([command[0], *options, *command[1:]], 120)


@pytest.mark.parametrize(
    ("algorithm", "form", "rest", "options"),
    [
        ("ring", "call", "awaited", []),
        ("ring", "split", "awaited", []),
        ("ring", "call", "awaited", ULFM),
        ("ring", "call", "finalized", []),
        ("ring", "call", "left alone", []),
        ("native", "call", "awaited", ULFM),
        ("native", "split", "awaited", ULFM),
    ],
)
def test_who_waits_for_a_rank_that_has_ended_is_told(
    algorithm: str, form: str, rest: str, options: list[str]
):
    done = early(algorithm, form, rest, options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(GONE) >= 2


@pytest.mark.parametrize("form", ["call", "split"])
def test_what_mpi_does_not_take_back_ends_the_job(form: str):
    """Where MPI cannot revoke a communicator."""
    done = early("native", form, "awaited", [])
    assert done.returncode != 0
    assert f"{GONE}; MPI's own collectives cannot be broken off: the job ends" in done.stderr
