"""Random plans on ranks equal the oracle, bitwise for integers, in every form of collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mpirun
from support.campaign import parameters

mpirun.needs_mpi()
SCRIPT = Path(mpirun.__file__).with_name("under_mpi.py")


@pytest.mark.parametrize(
    ("ranks", "least", "count"),
    parameters([(2, 2, 4), (4, 3, 2)], [(2, 2, 12), (3, 3, 4), (4, 4, 5), (8, 5, 3)]),
    ids=str,
)
def test_ranks_agree_with_the_oracle(ranks: int, least: int, count: int):
    output = mpirun.run(ranks, SCRIPT, 4000 + ranks, count, least, "usual", "split", "call", "rounds")
    assert output.splitlines()[-1] == f"{count} plans agree on up to {ranks} ranks"
