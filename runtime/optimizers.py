"""Check whether an optimizer works element by element, by comparing a small tree with its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
# The matrix is large enough for factored moments.
SHAPES = {"matrix": (130, 140), "vector": (10,), "small": (7, 3)}
PARTS, STEPS = 3, 3
SIZES = (1.0, 1e-4, 1e8)  # Sizes of gradients: some rules have an effect only if a norm is large.
# The relative difference that is allowed: kernels round differently for different shapes.
NEAR = 1e-4


class Difference(NamedTuple):
    """An element that is updated differently in a part of the tree than in the whole tree.

    Attributes:
        size: The standard deviation of the gradients, or None if one of them is not a number.
    """

    leaf: str
    whole: float
    part: float
    size: float | None


def difference(init: Callable[[Tree], Tree], update: Callable[[Tree, Tree, Tree], Any]) -> Difference | None:
    """Find an element that is updated differently in a part of the tree.

    The tree has three f32 leaves and is cut into three parts as owners get them. The test has three steps
    with small, usual and huge gradients, and with a NaN gradient.

    Args:
        init: Maps weights to a state.
        update: Maps (weights, state, gradients) to (weights, state).

    Returns:
        The element, or None if the optimizer is elementwise.
    """
    step = jax.jit(update)
    for size in (*SIZES, None):
        reason = _compare_trial(init, step, size)
        if reason is not None:
            return reason
    return None


def _compare_trial(
    init: Callable[[Tree], Tree], step: Callable[..., Any], size: float | None
) -> Difference | None:
    """Update a random tree and its parts with gradients of magnitude `size`, or with a NaN for None.

    Return the first difference.
    """
    rng = np.random.default_rng(7)
    whole = {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
    parts = [_part(whole, number) for number in range(PARTS)]
    states = [init(_arrays(tree)) for tree in (whole, *parts)]
    for _ in range(STEPS):
        drawn = {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
        gradient = {key: x * np.float32(1 if size is None else size) for key, x in drawn.items()}
        if size is None:
            gradient["vector"][0] = np.nan
        gradients = [gradient, *(_part(gradient, number) for number in range(PARTS))]
        trees: list[Tree] = []
        for number, before in enumerate((whole, *parts)):
            after, states[number] = step(_arrays(before), states[number], _arrays(gradients[number]))
            trees.append({key: np.asarray(after[key]) for key in SHAPES})
        reason = _unlike(whole, trees[0], trees[1:], size)
        if reason is not None:
            return reason
        whole, *parts = trees
    return None


def _unlike(before: Tree, whole: Tree, parts: list[Tree], size: float | None) -> Difference | None:
    """The first element whose update differs between the whole tree and its parts, beyond rounding.

    None if there is none.
    """
    for key, shape in SHAPES.items():
        count = int(np.prod(shape))
        start = before[key].reshape(-1).astype(np.float64)
        difference = whole[key].reshape(-1) - start
        other = np.concatenate([part[key] for part in parts])[:count] - start
        spread = NEAR * np.maximum(np.abs(difference), np.abs(other)) + 2.0**-21 * np.abs(start)
        close = (
            (np.abs(difference - other) <= spread)
            | (np.isnan(difference) & np.isnan(other))
            | (difference == other)
        )
        if not close.all():
            index = int(np.flatnonzero(~close)[0])
            return Difference(key, float(difference[index]), float(other[index]), size)
    return None


def _part(tree: Tree, number: int) -> Tree:
    """One of the parts that owners get: leaves flattened, padded with zeros and cut."""
    cut: Tree = {}
    for key, leaf in tree.items():
        flat = leaf.reshape(-1)
        rows = np.pad(flat, (0, -len(flat) % PARTS)).reshape(PARTS, -1)
        cut[key] = rows[number].copy()
    return cut


def _arrays(tree: Tree) -> Tree:
    return {key: jnp.asarray(leaf) for key, leaf in tree.items()}
