"""Pytrees with key paths, for all node types that are registered with JAX. See also `commplan.pytree`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax import Array

from commplan.pytree import is_key_type, nest

Structure = Any  # a PyTreeDef


@dataclass(frozen=True)
class Tree:
    """A value inside a phase.

    Attributes:
        leaves: Its leaves in JAX's order: arrays, or Python numbers of an argument that is not checked yet.
        structure: Its pytree structure.
    """

    leaves: tuple[Any, ...]
    structure: Structure

    def build(self) -> Any:
        """The pytree, as user functions receive it."""
        return jax.tree_util.tree_unflatten(self.structure, self.leaves)

    def like(self, leaves: Sequence[Any]) -> Tree:
        """A tree of the same structure with other leaves."""
        return Tree(tuple(leaves), self.structure)


LEAF = jax.tree_util.tree_structure(0)  # the structure of a bare array


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[tuple[str, ...], Tree]:
    """The key paths of the leaves, joined by `/` ("" for a bare array), and the tree.

    A typed random key becomes a u32 leaf with its words. The structure restores the key.

    Args:
        tree: Any pytree.
        is_leaf: As in `jax.tree_util.tree_flatten`.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    paths = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs)
    leaves = [leaf for _, leaf in pairs]
    if any(is_key_type(getattr(leaf, "dtype", None)) for leaf in leaves):
        words = [
            _Words.from_key(leaf) if is_key_type(getattr(leaf, "dtype", None)) else leaf for leaf in leaves
        ]
        return paths, Tree(*_words_of(jax.tree_util.tree_unflatten(structure, words)))
    return paths, Tree(tuple(leaves), structure)


def _words_of(tree: Any) -> tuple[tuple[Array, ...], Structure]:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return tuple(leaves), structure


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Words:
    """A pytree node for typed keys, whose leaf is the words of the keys. Unflattening returns the keys.

    Attributes:
        words: u32 array [.., words of a key], or its shape and dtype.
        kind: The name of the key's implementation, such as `threefry2x32`.
    """

    words: Array
    kind: str

    @staticmethod
    def from_key(key: Any) -> _Words:
        if isinstance(key, jax.Array):
            return _Words(jax.random.key_data(key), str(jax.random.key_impl(key)))
        kinds: list[str] = []

        def words(key: Any) -> Array:
            kinds.append(str(jax.random.key_impl(key)))
            return jax.random.key_data(key)

        return _Words(jax.eval_shape(words, jax.ShapeDtypeStruct(key.shape, key.dtype)), kinds[0])

    def tree_flatten(self) -> tuple[tuple[Array], str]:
        return (self.words,), self.kind

    @classmethod
    def tree_unflatten(cls, kind: str, words: tuple[Any]) -> Any:
        """The keys; or the leaf itself if it is not the words of keys, such as a shard that cuts a key."""
        (leaf,) = words
        dtype = str(getattr(leaf, "dtype", ""))
        shape = getattr(leaf, "shape", ())
        if not isinstance(leaf, jax.Array) or dtype != "uint32" or not shape:
            return leaf
        key = jax.random.wrap_key_data
        return key(leaf, impl=kind) if shape[-1] == _word_count(kind) else leaf


@functools.cache
def _word_count(kind: str) -> int:
    """The number of 32-bit words of a key of implementation `kind`."""
    return int(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=kind))).shape[-1])


def structure_of(paths: Sequence[str]) -> Structure:
    """Nested dicts with these key paths; the leaves are in the order of `paths`."""
    return jax.tree_util.tree_structure(nest(paths, [0] * len(paths)))


def known_structures(trees: Iterable[Any]) -> dict[tuple[str, ...], Structure]:
    """The structures of `trees`, by leaf paths. Leaves are arrays or dicts `{"shape": .., "dtype": ..}`.

    Of trees with equal paths, the last one counts.
    """
    structures: dict[tuple[str, ...], Structure] = {}
    for tree in trees:
        paths, flat = flatten(tree, _is_shape)
        structures[paths] = flat.structure
    return structures


def _is_shape(node: Any) -> bool:
    return isinstance(node, Mapping) and set(cast("Mapping[Any, Any]", node)) == {"shape", "dtype"}


def structure_by(paths: Sequence[str], structures: Mapping[tuple[str, ...], Structure]) -> Structure:
    """The structure of a tree with these key paths: from `structures`, or nested dicts."""
    structure = structures.get(tuple(paths))
    return structure_of(paths) if structure is None else structure


def build(
    paths: Sequence[str], leaves: Sequence[Any], structures: Mapping[tuple[str, ...], Structure]
) -> Any:
    """The tree of `leaves`.

    Args:
        paths: The key path of each leaf.
        leaves: The leaves.
        structures: Known structures by leaf paths. A tree with other paths consists of nested dicts.
    """
    return jax.tree_util.tree_unflatten(structure_by(paths, structures), leaves)
