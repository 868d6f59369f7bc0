"""Check whether an optimizer works element by element, by comparing a small tree with its parts.

`commplan.optax` calls `difference` before it shards an optimizer's state among owners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
# The shapes of the weights by leaf. The matrix is large enough for factored moments.
SHAPES = {"matrix": (130, 140), "vector": (10,), "small": (7, 3)}
# The number of parts into which each leaf is cut. Two leaves are padded first.
PARTS = 3
# The number of updates in each trial.
STEPS = 3
# The standard deviations of the gradients, one per trial. Some rules have an effect only if a norm is large.
SIZES = (1.0, 1e-4, 1e8)
# The allowed relative difference of an update. Kernels round differently for different shapes.
NEAR = 1e-4
# The allowed difference relative to the weight: four units in the last place of float32.
_ROUNDING = 2.0**-21


class Difference(NamedTuple):
    """An element that is updated differently in a part of the tree than in the whole tree.

    Attributes:
        leaf: The name of the leaf, a key of `SHAPES`.
        whole: The change of the element in the whole tree.
        part: Its change in a part.
        size: The standard deviation of the gradients, or None if one of them is not a number.
    """

    leaf: str
    whole: float
    part: float
    size: float | None


def difference(init: Callable[[Tree], Tree], update: Callable[[Tree, Tree, Tree], Any]) -> Difference | None:
    """Find an element that is updated differently in a part of the tree.

    The tree has float32 leaves of the shapes `SHAPES`, and is cut into `PARTS` parts as owners get them. One
    trial has `STEPS` updates. There is a trial for each of `SIZES`, and one with a NaN among the gradients.

    Args:
        init: Maps weights to a state.
        update: Maps (weights, state, gradients) to (weights, state).

    Returns:
        The first such element, or None if no trial shows one.
    """
    step = jax.jit(update)
    for size in (*SIZES, None):
        mismatch = _compare_trial(init, step, size)
        if mismatch is not None:
            return mismatch
    return None


def _compare_trial(
    init: Callable[[Tree], Tree], step: Callable[..., Any], size: float | None
) -> Difference | None:
    """Update a random tree and its parts, and return the first difference, or None.

    Args:
        init: See `difference`.
        step: The compiled update.
        size: The standard deviation of the gradients. None means 1, with a NaN as one of the gradients.
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
        mismatch = _unlike(whole, trees[0], trees[1:], size)
        if mismatch is not None:
            return mismatch
        whole, *parts = trees
    return None


def _unlike(before: Tree, whole: Tree, parts: list[Tree], size: float | None) -> Difference | None:
    """The first element whose change differs between the whole tree and its parts by more than rounding.

    Args:
        before: The whole tree before an update.
        whole: The whole tree after it.
        parts: The parts after it, in order.
        size: See `Difference`.

    Returns:
        The difference, or None. Infinities of one sign and NaNs count as equal.
    """
    for key, shape in SHAPES.items():
        count = int(np.prod(shape))
        start = before[key].reshape(-1).astype(np.float64)
        change = whole[key].reshape(-1) - start
        part_change = np.concatenate([part[key] for part in parts])[:count] - start  # Without the padding.
        tolerance = NEAR * np.maximum(np.abs(change), np.abs(part_change)) + _ROUNDING * np.abs(start)
        close = (
            (np.abs(change - part_change) <= tolerance)
            | (np.isnan(change) & np.isnan(part_change))
            | (change == part_change)
        )
        if not close.all():
            index = int(np.flatnonzero(~close)[0])
            return Difference(key, float(change[index]), float(part_change[index]), size)
    return None


def _part(tree: Tree, number: int) -> Tree:
    """Part `number` of `tree`, as owner `number` gets it: leaves flattened, padded with zeros and cut."""
    cut: Tree = {}
    for key, leaf in tree.items():
        flat = leaf.reshape(-1)
        rows = np.pad(flat, (0, -len(flat) % PARTS)).reshape(PARTS, -1)
        cut[key] = rows[number].copy()
    return cut


def _arrays(tree: Tree) -> Tree:
    return {key: jnp.asarray(leaf) for key, leaf in tree.items()}
