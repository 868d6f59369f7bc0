"""Match the leaves of optimizer states to weights.

Optimizers keep trees shaped like the weights, with leaves whose paths end in the paths of the weights. The
servers divide states, and the verifier computes elementwise functions, by these matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.ir.values import Leaf


def weights_of(leaves: Sequence[Leaf], weights: Sequence[Leaf]) -> tuple[int | None, ...]:
    """For each leaf of an optimizer state, the index of the weight that it belongs to.

    A leaf matches a weight of the same shape whose path is a suffix of the leaf's path, in whole keys; the
    longest suffix wins. The path of a single array is empty, and a suffix of every path. Of several weights
    with the same path and shape, the first one matches.

    Args:
        leaves: The leaves of the state.
        weights: The leaves of the weights.

    Returns:
        An index in `weights` for each of `leaves`, or None for a leaf without a match.

    >>> from commplan.ir.types import DType
    >>> w, count = Leaf("w", (3,), DType.F32), Leaf("0/count", (), DType.I32)
    >>> weights_of((count, Leaf("0/mu/w", (3,), DType.F32)), (w,))
    (None, 0)
    """
    indices: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, leaf in enumerate(weights):
        indices.setdefault((leaf.path, leaf.shape), index)
    return tuple(_longest(leaf, indices) for leaf in leaves)


def _longest(leaf: Leaf, indices: dict[tuple[str, tuple[int, ...]], int]) -> int | None:
    """The index of the weight with the longest matching path; `indices` are by path and shape."""
    keys = leaf.path.split("/")
    for first in range(len(keys) + 1):  # the last suffix is empty
        index = indices.get(("/".join(keys[first:]), leaf.shape))
        if index is not None:
            return index
    return None


class LeafMatch(NamedTuple):
    """The operand leaves that each result leaf of an elementwise function depends on.

    Attributes:
        groups: For each result and each of its leaves, the (operand, leaf) pairs of the same weight, as
            indices. Empty for a scalar that belongs to no weight; None for another leaf without a match.
        scalars: The (operand, leaf) pairs of scalars that belong to no weight; all result leaves may depend
            on them.
        straight: Whether leaf i of each result depends on leaf i of every operand that is not in `scalars`
            and has leaves, and on `scalars`. An operand in `scalars` then has no other leaf.
    """

    groups: tuple[tuple[tuple[tuple[int, int], ...] | None, ...], ...]
    scalars: tuple[tuple[int, int], ...]
    straight: bool


def leaf_match(operands: Sequence[Sequence[Leaf]], results: Sequence[Sequence[Leaf]]) -> LeafMatch:
    """Match the leaves of the operands and results of an elementwise function.

    The weights are the operand or result with the fewest leaves that are not scalars, but at least one; or
    the first result if all leaves are scalars.

    Args:
        operands: The leaves of each operand.
        results: The leaves of each result.
    """
    trees = [leaves for leaves in (*results, *operands) if any(leaf.shape for leaf in leaves)]
    weights = min(trees or results, key=lambda leaves: sum(bool(leaf.shape) for leaf in leaves), default=())
    members: dict[int, list[tuple[int, int]]] = {}
    scalars: list[tuple[int, int]] = []
    for operand, leaves in enumerate(operands):
        for index, owner in enumerate(weights_of(leaves, weights)):
            if owner is not None:
                members.setdefault(owner, []).append((operand, index))
            elif not leaves[index].shape:
                scalars.append((operand, index))

    def group(leaf: Leaf, owner: int | None) -> tuple[tuple[int, int], ...] | None:
        if owner is None:
            return None if leaf.shape else ()
        return tuple(members.get(owner, ()))

    groups = tuple(tuple(map(group, leaves, weights_of(leaves, weights))) for leaves in results)
    scalar_operands = {operand for operand, _ in scalars}
    matched = [
        operand for operand, leaves in enumerate(operands) if leaves and operand not in scalar_operands
    ]
    straight = all(len(operands[operand]) == 1 for operand in scalar_operands) and all(
        each == tuple((operand, index) for operand in matched)
        for result in groups
        for index, each in enumerate(result)
    )
    return LeafMatch(groups, tuple(scalars), straight)
