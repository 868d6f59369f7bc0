"""Values of every kind mean on the ranks of a communicator what they mean on a mesh of devices."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from support import mpirun, passed_values
from support.embedding import mesh_of

mpirun.needs_mpi()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks") / "found.pkl"
    mpirun.run(passed_values.RANKS, Path(passed_values.__file__), out)
    return pickle.loads(out.read_bytes())


@pytest.fixture(scope="module")
def on_devices() -> dict[str, Any]:
    return passed_values.outcomes(mesh_of(data=passed_values.RANKS))


def test_numbers_are_accepted_alike(on_ranks: dict[str, Any], on_devices: dict[str, Any]) -> None:
    assert on_ranks == on_devices
    sums = ((2.0, "float32"), (6, "int32"))
    for name in (
        "arrays",
        "python numbers",
        "an int for f32",
        "numpy scalars",
        "wide numpy scalars",
        "weak types",
    ):
        assert on_devices[name][:2] == sums == on_devices[f"{name}, jit"][:2]
    assert on_devices["a bool for i32"][1] == (2, "int32")
    for name in ("a float for i32", "too large", "a list", "a dimension", "bf16", "a text"):
        assert "CP0805" in on_devices[name], on_devices[name]


def test_a_value_is_reduced_once(on_ranks: dict[str, Any]) -> None:
    for name in ("reduced twice", "reduced twice, alone", "reduced twice, negated"):
        assert "CP0807" in on_ranks[name]
        assert "phase `again` made it the same on all ranks: line 13 of the plan" in on_ranks[name]
