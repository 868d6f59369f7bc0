"""Workers and servers under real `mpirun`: what NumPy says, to the last bit where the order is fixed."""

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
    said = mpirun.run(ranks, WORKER, *cases).splitlines()
    assert sorted(said) == sorted(f"{case} ok" for case in cases for _ in range(ranks))
