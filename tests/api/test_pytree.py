"""Pytrees without jax: the same leaves, paths and rebuilding as jax has."""

from __future__ import annotations

import doctest
from collections import OrderedDict
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan import pytree as trees_module
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.pytree import flatten, is_plain, nest, shapes_of


class Moments(NamedTuple):
    mean: Any
    count: Any


leaves = st.integers() | st.floats(allow_nan=False) | st.booleans()
trees = st.recursive(
    leaves | st.none(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abcXYZ/_01", max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(0, 20), inner, max_size=3),
        st.dictionaries(st.text("ab", max_size=2), inner, max_size=3).map(lambda d: OrderedDict(d.items())),
        st.builds(Moments, inner, inner),
    ),
    max_leaves=12,
)


@given(trees)
def test_the_same_as_jax(tree: Any) -> None:
    import jax  # noqa: PLC0415

    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    expected = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]
    leaves, rebuild = flatten(tree)
    assert leaves == expected
    changed = [f"leaf {index}" for index in range(len(leaves))]
    again = rebuild(changed)
    assert again == jax.tree_util.tree_unflatten(structure, changed)
    assert jax.tree_util.tree_structure(again) == structure


def test_a_single_leaf() -> None:
    leaves, rebuild = flatten(3)
    assert leaves == [("", 3)]
    assert rebuild([4]) == 4


def test_rebuilding_wants_every_leaf() -> None:
    with pytest.raises(ValueError, match="expected 2 leaves, found 3"):
        flatten([1, 2])[1]([1, 2, 3])


def test_shapes_of_arrays_and_specs() -> None:
    tree = {
        "w": np.zeros((3, 4), np.float32),
        "spec": {"shape": [2, 0], "dtype": "bf16"},
        "numpy": {"shape": (), "dtype": "bfloat16"},
        "type": {"shape": [1], "dtype": np.dtype("int64")},
        "kind": {"shape": [1], "dtype": np.float16},
        "numbers": [1, 2.0, True, None],
        "scalar": np.float64(1),
    }
    assert shapes_of(tree) == (
        Leaf("kind", (1,), DType.F16),
        Leaf("numbers/0", (), DType.I32),
        Leaf("numbers/1", (), DType.F32),
        Leaf("numbers/2", (), DType.BOOL),
        Leaf("numpy", (), DType.BF16),
        Leaf("scalar", (), DType.F64),
        Leaf("spec", (2, 0), DType.BF16),
        Leaf("type", (1,), DType.I64),
        Leaf("w", (3, 4), DType.F32),
    )
    assert shapes_of({"shape": [5], "dtype": "u8"}) == (Leaf("", (5,), DType.U8),)
    assert shapes_of({}) == ()


@pytest.mark.parametrize("dtype", ["complex64", "int4", "float8_e4m3fn", "f128", "", np.dtype("uint64")])
def test_dtypes_that_plans_do_not_know(dtype: Any) -> None:
    with pytest.raises(CommplanError) as caught:
        shapes_of({"a": {"w": {"shape": [1], "dtype": dtype}}})
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP0703"
    assert "leaf `a/w` has dtype" in problem.message
    assert "float32, bfloat16" in problem.notes[0].text


@pytest.mark.parametrize(
    "leaf",
    ["text", object(), {1, 2}, HTTPStatus.OK, {"shape": 3, "dtype": "f32"}, {"shape": [-1], "dtype": "f32"},
     {"shape": [1.5], "dtype": "f32"}, {"shape": [True], "dtype": "f32"}, {"shape": "33", "dtype": "f32"},
     {"shape": None, "dtype": "f32"}],
)  # fmt: skip
def test_leaves_without_a_shape(leaf: Any) -> None:
    with pytest.raises(CommplanError) as caught:
        shapes_of({"w": leaf})
    assert caught.value.diagnostics[0].code == "CP0720"
    assert "`w`" in caught.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a/b": 1, "a": {"b": 2}}, "two leaves have the path `a/b`"),
        (
            {"layers": {0: 1.0, "x": 2.0}},
            "the keys of `layers` cannot be sorted: they are of the types int, str",
        ),
    ],
)
def test_trees_whose_paths_are_not_clear(tree: Any, message: str) -> None:
    with pytest.raises(CommplanError) as caught:
        shapes_of(tree)
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].message) == ("CP0720", message)


def test_plain_trees() -> None:
    assert is_plain({"w": np.zeros(3), "s": [1, {"shape": [], "dtype": "f32"}]})
    assert not is_plain({"w": object()})


@given(st.recursive(leaves, lambda t: st.dictionaries(st.text("abc", min_size=1), t, min_size=1, max_size=3)))
def test_dicts_come_back_from_paths(tree: Any) -> None:
    leaves, _ = flatten(tree)
    assert nest([path for path, _ in leaves], [leaf for _, leaf in leaves]) == tree


@given(st.lists(st.text("ab-/", max_size=5), min_size=1, max_size=5))
def test_nested_dicts_keep_the_order_of_the_paths_or_are_refused(paths: list[str]) -> None:
    try:
        tree = nest(paths, range(len(paths)))
    except CommplanError as error:
        assert error.diagnostics[0].code == "CP0720"
    else:
        assert flatten(tree)[0] == [(path, number) for number, path in enumerate(paths)]


@pytest.mark.parametrize("paths", [["a/w", "a-b/w", "a/b/w"], ["a", "a/b"], ["a/b", "a"], ["a", "a"]])
def test_paths_that_nested_dicts_do_not_have_in_this_order(paths: list[str]) -> None:
    with pytest.raises(CommplanError, match=f"leaf `{paths[-1]}` has no place in nested dicts"):
        nest(paths, [{} for _ in paths])


def test_values_may_be_dicts() -> None:
    spec = {"shape": [], "dtype": "f32"}
    assert nest(["w"], [spec])["w"] is spec


def test_the_examples_of_the_docstrings() -> None:
    results = doctest.testmod(trees_module)
    assert (results.failed, results.attempted) == (0, 4)


@pytest.mark.parametrize(("leaf", "missing"), [({"shape": [3]}, "dtype"), ({"dtype": "f32"}, "shape")])
def test_a_leaf_with_half_of_what_it_needs(leaf: dict[str, Any], missing: str) -> None:
    with pytest.raises(CommplanError, match=f"leaf `w` has no `{missing}`"):
        shapes_of({"w": leaf})
    assert is_plain({"w": leaf})
