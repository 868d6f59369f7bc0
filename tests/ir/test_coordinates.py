"""Ranks and coordinates, against NumPy's row-major order."""

from __future__ import annotations

import doctest

import numpy as np

from commplan.ir import axes
from commplan.ir.axes import coordinates, group, groups, position

SIZES = {"pod": 2, "rack": 3, "worker": 4}


def test_its_examples_hold() -> None:
    results = doctest.testmod(axes)
    assert results.attempted and not results.failed


def test_ranks_count_row_major() -> None:
    shape = tuple(SIZES.values())
    for rank in range(24):
        place = coordinates(rank, SIZES, SIZES)
        assert tuple(place[axis] for axis in SIZES) == np.unravel_index(rank, shape)
        assert position(place, SIZES, SIZES) == rank


def test_groups_are_the_rows_of_a_transposed_mesh() -> None:
    mesh = np.arange(24).reshape(2, 3, 4)
    assert list(groups(("worker", "pod"), SIZES)) == [
        tuple(row) for row in mesh.transpose(1, 2, 0).reshape(3, 8).tolist()
    ]
    assert group({"pod": 1, "rack": 2, "worker": 0}, ("rack",), SIZES) == (12, 16, 20)
    assert list(groups((), SIZES)) == [(rank,) for rank in range(24)]
