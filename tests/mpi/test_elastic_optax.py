"""Elastic averaging as an optax transformation, under mpirun."""

from __future__ import annotations

from pathlib import Path

from support import mpirun

mpirun.needs_mpi()


def test_chained_behind_an_optimizer_it_is_what_the_equations_say():
    worker = Path(__file__).parent / "elastic_optax_worker.py"
    assert mpirun.run(3, worker).split() == ["ok"] * 3
