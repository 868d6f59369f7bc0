"""Parameter exchange between ranks under real `mpirun`: exactly the equations."""

from __future__ import annotations

from pathlib import Path

from support import mpirun

mpirun.needs_mpi()


def test_the_weights_are_those_of_the_equations():
    mpirun.run(3, Path(__file__).parent / "exchange_worker.py")
