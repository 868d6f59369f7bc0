"""Workers and servers under real `mpirun` equal NumPy, bitwise if the order is fixed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mpirun

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "servers_worker.py"


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (4, ("exchange", "silent", "round_robin", "hogwild", "left_open")),
        (3, ("roles", "central", "async", "collected", "mapped", "messages")),
    ],
)
def test_workers_get_what_numpy_says(ranks: int, cases: tuple[str, ...]):
    lines = mpirun.run(ranks, WORKER, *cases).splitlines()
    assert sorted(lines) == sorted(f"{case} ok" for case in cases for _ in range(ranks))


ABSENT = """
import sys
import numpy as np
from mpi4py import MPI
from servers_worker import ELASTIC, TREE, refused
import commplan

text = ELASTIC.format(servers=1, mode="hogwild", eta="eta", hints="")
comm = MPI.COMM_WORLD
run = commplan.loads(text).compile(comm, shapes={"params": TREE, "center": TREE}).bind(comm)
if run.role == "server":
    sys.exit()  # without run.serve()
def ask():
    _, state = run.start(run.init(), params=TREE)
    run.step(state, params=TREE, eta=np.float32(0.1))
refused("CP0834", ask)
print("told")
"""


def test_a_server_that_never_serves_is_not_waited_for():
    folder = f"import sys; sys.path.insert(0, {str(WORKER.parent)!r})"
    assert mpirun.run(2, folder + ABSENT).split() == ["told"]
