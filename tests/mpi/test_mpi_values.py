"""Values of every kind mean the same on ranks of a communicator as on a mesh of devices."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mpirun, passed_values
from support.embedding import mesh_of

mpirun.needs_mpi()


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks") / "found.pkl"
    mpirun.run(passed_values.RANKS, Path(passed_values.__file__), out)
    return pickle.loads(out.read_bytes())


@pytest.fixture(scope="module")
def on_ranks(every: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    return every[0][0]


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


def test_leaves_of_every_type_are_moved(every: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    trees = [passed_values.leaves_of(rank) for rank in range(passed_values.RANKS)]
    pairs = [passed_values.pairs_of(tree) for tree in trees]
    mine, blocks = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in (trees, pairs))
    moved = passed_values.moves(mesh_of(data=passed_values.RANKS), mine, blocks)
    expected = [passed_values.data(tree) for tree in trees]
    for name, rank in {"first": 0, "whole": 0, "held": 1, "state": 1, "after": 1}.items():
        assert moved[name] == expected[rank] == every[0][1][name] == every[1][1][name], name
    zeros = jax.tree.map(lambda x: (x[0], np.zeros_like(x[1]).tolist()), expected[0], is_leaf=_is_pair)
    assert moved["init"] == zeros == every[0][1]["init"]
    for name in ("next", "other"):
        for how in (name, f"{name}, jit"):
            for rank, (_, leaves) in enumerate(every):
                each = jax.tree.map(lambda x, r=rank: (x[0], x[1][r]), moved[how], is_leaf=_is_pair)
                assert leaves[how] == each, how
    for rank, (_, leaves) in enumerate(every):
        assert leaves["next"] == expected[1 - rank]


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple)
