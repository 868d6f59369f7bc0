"""Which weight a leaf of an optimizer's state belongs to."""

from __future__ import annotations

import doctest

from commplan.ir.analysis import optimizer_leaf_match
from commplan.ir.analysis.optimizer_leaf_match import weights_of
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType


def leaf(path: str, *shape: int) -> Leaf:
    return Leaf(path, shape, DType.F32)


def test_its_examples_hold() -> None:
    results = doctest.testmod(optimizer_leaf_match)
    assert results.attempted and not results.failed


def test_the_longest_path_of_the_same_shape_is_meant() -> None:
    weights = leaf("w", 3), leaf("dense/w", 3), leaf("b/dense/w", 4)
    assert weights_of([leaf("0/mu/b/dense/w", 3), leaf("0/mu/w", 3), leaf("w", 4)], weights) == (1, 0, None)


def test_an_array_without_a_path_goes_with_every_leaf_of_its_shape() -> None:
    assert weights_of([leaf("0/mu", 3), leaf("", 3), leaf("0/nu", 2)], [leaf("", 3)]) == (0, 0, None)
