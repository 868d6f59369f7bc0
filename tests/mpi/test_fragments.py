"""Fragments and hidden exchanges under mpirun."""

from __future__ import annotations

from pathlib import Path

from support import mpirun

mpirun.needs_mpi()


def test_islands_exchange_fragments_as_the_reference():
    worker = Path(__file__).parent / "fragments_worker.py"
    assert mpirun.run(4, worker).split() == ["ok"] * 4
