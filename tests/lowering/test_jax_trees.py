"""Pytrees with their paths: every registered node, and the same answers as without JAX."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import code_of

from commplan import pytree as plain
from commplan.api import shapes_of
from commplan.diagnostics import CommplanError
from commplan.lowering.jax import pytree

Pair = namedtuple("Pair", ["first", "second"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


PLAIN = {"b": [1.0, (2, None)], "a": Pair({"x": 3}, 4), "c": OrderedDict(z=5, y=6)}


def test_paths_are_those_of_the_core():
    arrays = jax.tree.map(jnp.asarray, PLAIN)
    paths, tree = pytree.flatten(arrays)
    pairs, _ = plain.flatten(arrays)
    assert paths == tuple(path for path, _ in pairs)
    assert jax.tree.structure(tree.build()) == jax.tree.structure(arrays)


def test_nodes_that_only_jax_knows():
    paths, tree = pytree.flatten({"layer": Layer(np.zeros((2, 3)), np.zeros(3))})
    assert paths == ("layer/weight", "layer/bias")
    assert isinstance(tree.build()["layer"], Layer)


def test_a_bare_array_has_an_empty_path():
    assert pytree.flatten(np.zeros(3))[0] == ("",)


@pytest.mark.parametrize(("leaf", "code"), [("text", "CP0720"), (np.zeros(2, np.complex64), "CP0703")])
def test_leaves_that_plans_do_not_have(leaf: Any, code: str):
    with pytest.raises(CommplanError) as error:
        shapes_of({"a": Layer(np.zeros(1), leaf)})
    assert code_of(error) == code
    assert "`a/bias`" in str(error.value)


def test_structures_from_paths_alone_keep_the_order_of_the_leaves():
    paths, tree = pytree.flatten({"layers": [np.zeros(1)] * 12, "b": 0})
    structure = pytree.structure_of(paths)
    rebuilt = jax.tree.unflatten(structure, range(len(paths)))
    assert pytree.flatten(rebuilt)[0] == paths
    assert rebuilt["layers"]["10"] == 11
    assert pytree.structure_of(("",)) == pytree.LEAF
    assert len(tree.leaves) == 13


def test_a_list_of_twelve_leaves_is_built_again_in_its_order():
    """With its structure, and without as dicts, in an order that would put "10" before "2"."""
    paths, tree = pytree.flatten({"layers": list(range(12))})
    rebuilt = pytree.build(paths, range(12), {paths: tree.structure})
    assert rebuilt == {"layers": list(range(12))}
    guessed = pytree.build(paths, range(12), {})
    assert guessed == {"layers": {str(i): i for i in range(12)}}
    assert jax.tree.leaves(guessed) == list(range(12))
    assert plain.flatten(plain.nest(paths, range(12)))[0] == list(zip(paths, range(12), strict=True))
