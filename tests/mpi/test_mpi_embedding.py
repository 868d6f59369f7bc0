"""The embedding on the ranks of a communicator equals that on a mesh of devices, rank by rank."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import mpirun, whole_run
from support.embedding import mesh_of

mpirun.needs_mpi()
RANKS = 4


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks") / "found.pkl"
    mpirun.run(RANKS, Path(whole_run.__file__), out)
    return pickle.loads(out.read_bytes())


@pytest.fixture(scope="module")
def on_devices() -> list[dict[str, Any]]:
    run, decoded = whole_run.bind(mesh_of(member=2, data=2))
    each = [whole_run.beginning(rank) for rank in range(RANKS)]
    params = jax.tree.map(lambda *rows: np.stack(rows).reshape(2, 2, *rows[0].shape), *each)
    parts = whole_run.Parts(run)
    results = whole_run.train(run, params, np.int32(5), parts.own)
    assert len(decoded) > 0
    ranks = [
        {name: tree[rank] for name, tree in results.items() if name[0].isdigit()} for rank in range(RANKS)
    ]
    return [record | {"state of batches": results["state of batches"]} for record in ranks]


def test_every_phase_and_every_batch(on_ranks: list[dict[str, Any]], on_devices: list[dict[str, Any]]):
    for rank in range(RANKS):
        ours, theirs = on_ranks[rank], on_devices[rank]
        assert {name for name in ours if name[0].isdigit()} == {n for n in theirs if n[0].isdigit()}
        for name, expected in theirs.items():
            if name == "state of batches":
                assert ours[name] == expected
                continue
            got = jax.tree.leaves(ours[name])
            for actual, exact in zip(got, jax.tree.leaves(expected), strict=True):
                assert actual.dtype == exact.dtype
                if np.issubdtype(actual.dtype, np.floating):
                    np.testing.assert_allclose(actual, exact, rtol=2e-5, atol=1e-5, err_msg=f"{rank} {name}")
                else:
                    np.testing.assert_array_equal(actual, exact, err_msg=f"{rank} {name}")


def test_ranks_lie_row_major_and_share_what_they_decode(on_ranks: list[dict[str, Any]]):
    assert [results["place"] for results in on_ranks] == [
        {"member": member, "data": data} for member in range(2) for data in range(2)
    ]
    # Two epochs, each record decoded once on this host, by the four ranks together.
    decoded = sorted(record for results in on_ranks for record in results["decoded"])
    padded = [6 * i % 256 for i in range(20)]
    assert sorted(set(decoded)) == sorted(padded)
    assert all(len(results["decoded"]) == len(decoded) / RANKS for results in on_ranks)


def test_random_functions_differ_between_members_alone(on_ranks: list[dict[str, Any]]):
    noise = [results["1 noise"]["w"] - results["1 center"]["w"] for results in on_ranks]
    np.testing.assert_array_equal(noise[0], noise[1])
    np.testing.assert_array_equal(noise[2], noise[3])
    assert not np.array_equal(noise[0], noise[2])


def test_optax_and_taps(on_ranks: list[dict[str, Any]]):
    _, both, layers = whole_run.reduced(mesh_of(data=RANKS))
    x = np.linspace(-2, 2, 2 * RANKS * 4, dtype=np.float32).reshape(RANKS * 2, 4)
    _, updated, tapped = both({}, layers, x)
    for results in on_ranks:
        np.testing.assert_allclose(results["updated"], updated["w"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(results["tapped"], tapped["w"], rtol=1e-5, atol=1e-6)
    assert np.abs(tapped["w"]).max() > 1e-3


def test_a_member_by_itself(on_ranks: list[dict[str, Any]]):
    for rank, results in enumerate(on_ranks):
        np.testing.assert_array_equal(results["member batch"], results["1 batch"])
        # `start` broadcasts what replica 1 of each member began with.
        np.testing.assert_array_equal(results["member params"], np.full((2, 6), rank // 2 * 2 + 1))


def test_operations_are_ordered_phase_after_phase():
    script = Path(mpirun.__file__).with_name("order_ranks.py")
    assert mpirun.run(2, script).splitlines() == ["in order"] * 2
