"""The engine under real `mpirun`: every algorithm, kind, form and element type against the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import mpirun
from support.campaign import parameters

WORKER = Path(__file__).parent / "engine_worker.py"
# How many cases each part has at least, whatever the ranks.
LEAST = {"call": 250, "split": 100, "rounds": 40, "dtypes": 150, "dtypes-rounds": 90}
LEAST |= {"large": 50, "grid": 40, "together": 50}

mpirun.needs_mpi()


@pytest.mark.parametrize(
    ("ranks", "parts"),
    parameters(
        [
            (2, ("split", "dtypes", "large", "dtypes-rounds")),
            (3, ("call", "together", "rounds")),
            (4, ("grid",)),
        ],
        [
            (2, ("call", "grid", "rounds")),
            (3, ("split", "large")),
            (3, ("grid",)),
            (4, ("call", "together")),
            (5, ("call", "dtypes")),
            (8, ("call", "grid")),
        ],
    ),
)
def test_collectives_agree_with_the_oracle(ranks: int, parts: tuple[str, ...]):
    report = json.loads(mpirun.run(ranks, WORKER, *parts).splitlines()[-1])
    assert report["wrong"] == []
    assert {part: many >= LEAST[part] for part, many in report["cases"].items()} == dict.fromkeys(parts, True)
