"""`mpirun -n N commplan run` with servers: roles by rank, one report, and all ranks end if one dies."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import interpreter, mpirun

import commplan

mpirun.needs_mpi()
from commplan.runtime.machines.communicator import check_size  # noqa: E402  it needs MPI

PLAN = """plan served

axis   worker = ?
server hub    = 1

input params  : f32[1000] per worker
input grads   : f32[1000] partial worker
state weights : f32[1000] on hub
state center  : f32[1000] on hub
fn sgd(f32[1000], f32[1000]) -> f32[1000] on device elementwise
fn half(f32[1000]) -> f32[1000] on device

at start {
    weights = broadcast params over worker from 0
    center  = broadcast params over worker from 0
    output weights
}

each step {
    weights = exchange grads into weights with sgd over worker by mean { chunk = 1 KiB }
    output weights
}

every 2 steps {
    mine = map half(params)
    pull, center = elastic mine with center over worker by async(eta = 0.5, rho = 0.5)
    output pull
}
"""
FUNCTIONS = """
import os, signal
from commplan.runtime.rehearse import rehearse

DIES, CALLS = {dies}, {calls}
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
call = rehearse._Stage.call
begun = []

def sgd(w, g):
    if RANK == DIES == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return w - 0.5 * g

def half(x):
    return x * 0.5

def counted(self, state):
    begun.append(self.name)
    if RANK == DIES and len(begun) > CALLS:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, state)

rehearse._Stage.call = counted
"""
SURVIVING = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")


def started(
    ranks: int, folder: Path, *words: str, dies: int = -1, mpi: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "served.plan").write_text(PLAN)
    (folder / "functions.py").write_text(FUNCTIONS.format(dies=dies, calls=4))
    command = [str(mpirun.MPIRUN), *mpi, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    run = [
        *interpreter.words(mpirun.environment()), "-m", "commplan.cli", "run", str(folder / "served.plan"),
        "--fn", f"sgd={folder}/functions.py:sgd", "--fn", f"half={folder}/functions.py:half", *words,
    ]  # fmt: skip
    return mpirun.started([*command, *run], timeout=120)


def test_another_number_of_ranks_is_told_by_roles() -> None:
    plan = commplan.loads(PLAN).compile(backend="mpi", axes={"worker": 2})
    with pytest.raises(
        commplan.CommplanError, match=r"workers: 2 \(worker = 2\)\n.* after the workers: 1 \(hub = 1\)"
    ):
        check_size(plan.schedule, SimpleNamespace(Get_size=lambda: 5))


def test_ranks_take_their_roles_and_are_reported(tmp_path: Path) -> None:
    done = started(3, tmp_path, "--steps", "4", "--format", "json")
    assert done.returncode == 0, done.stderr
    report: Any = json.loads(done.stdout)
    assert report["processes"] == 3 and report["axes"] == {"worker": 2, "hub": 1}
    calls = {phase["name"]: phase["calls"] for phase in report["phases"]}
    assert calls == {"start": 1, "step": 4, "every_2": 2}
    (server,) = report["servers"]
    assert (server["rank"], server["name"], server["lost"]) == (2, "server `hub`", [])
    assert server["requests"] == 2 * (2 + 4 + 2)  # of both workers: states set, steps, averages
    units = 4
    assert server["updates"] == 4 * units + 2 * 2 * 1
    assert server["nbytes"] > 2 * 4 * 4000 and server["answered"] > 2 * 4 * 4000


WORKER, SERVER = "died and excluded: rank 1", "error[CP0834]: server `hub` (rank 2) has died"


@pytest.mark.parametrize(("dies", "message"), [(1, WORKER), (2, SERVER)])
def test_who_lives_ends_when_another_dies(tmp_path: Path, dies: int, message: str) -> None:
    done = started(3, tmp_path, "--steps", "6", dies=dies, mpi=SURVIVING)
    assert message in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "internal failure" not in done.stderr
