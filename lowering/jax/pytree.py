"""Pytrees with their key paths: the JAX side of `commplan.pytree`, for every registered node type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commplan.lowering.jax.typing_shim import jax
from commplan.pytree import nest

Array = Any
Structure = Any  # a PyTreeDef


@dataclass(frozen=True)
class Tree:
    """A value while a phase runs: its leaves in JAX's flattening order, and its structure."""

    leaves: tuple[Array, ...]
    structure: Structure

    def build(self) -> Any:
        return jax.tree_util.tree_unflatten(self.structure, self.leaves)

    def like(self, leaves: Sequence[Array]) -> Tree:
        """A tree of the same structure with other leaves."""
        return Tree(tuple(leaves), self.structure)


LEAF = jax.tree_util.tree_structure(0)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[tuple[str, ...], Tree]:
    """The key path of every leaf, parts joined by `/` ("" for a bare array), and the tree."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    paths = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs)
    return paths, Tree(tuple(leaf for _, leaf in pairs), structure)


def structure_of(paths: Sequence[str]) -> Structure:
    """The structure that key paths alone tell: nested dicts, whose leaves come in the order of `paths`."""
    return jax.tree_util.tree_structure(nest(paths, [0] * len(paths)))


def structure_by(paths: Sequence[str], structures: Mapping[tuple[str, ...], Structure]) -> Structure:
    """The structure of a tree with these key paths: the one in `structures`, else nested dicts."""
    known = structures.get(tuple(paths))
    return structure_of(paths) if known is None else known


def build(
    paths: Sequence[str], leaves: Sequence[Array], structures: Mapping[tuple[str, ...], Structure]
) -> Any:
    """The tree of `leaves`, one per key path, with the structure of `structure_by`."""
    return jax.tree_util.tree_unflatten(structure_by(paths, structures), leaves)
