"""Which leaf goes with which, in trees that are alike: an optimiser keeps, beside the weights, trees whose
leaves lie at paths that end as the weights' do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.ir.values import Leaf


def weights_of(kept: Sequence[Leaf], weights: Sequence[Leaf]) -> tuple[int | None, ...]:
    """Of each leaf of `kept` the weight that it belongs to, by its index; None where there is none.

    Of the weights of its shape with whose path its own path ends it is the one with the longest.

    >>> from commplan.ir.types import DType
    >>> w, count = Leaf("w", (3,), DType.F32), Leaf("0/count", (), DType.I32)
    >>> weights_of((count, Leaf("0/mu/w", (3,), DType.F32)), (w,))
    (None, 0)
    """
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, leaf in enumerate(weights):
        known.setdefault((leaf.path, leaf.shape), index)
    return tuple(_longest(leaf, known) for leaf in kept)


def _longest(leaf: Leaf, known: dict[tuple[str, tuple[int, ...]], int]) -> int | None:
    keys = leaf.path.split("/")
    for first in range(len(keys) + 1):
        index = known.get(("/".join(keys[first:]), leaf.shape))
        if index is not None:
            return index
    return None


class LeafMatch(NamedTuple):
    """Which leaves of its operands a leaf of a result of an elementwise function is made of.

    groups: for each result and each of its leaves, (operand, leaf) of those that belong to the same weight.
    scalars: those that belong to no weight: all leaves may depend on them. straight: every leaf of every
    result is made of the leaves of its own index, one of each operand that is no such scalar.
    """

    groups: tuple[tuple[tuple[tuple[int, int], ...] | None, ...], ...]
    scalars: tuple[tuple[int, int], ...]
    straight: bool


def leaf_match(operands: Sequence[Sequence[Leaf]], results: Sequence[Sequence[Leaf]]) -> LeafMatch:
    """See `LeafMatch`. The weights are the leaves of that tree, of all, that has the fewest that are no
    scalars."""
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
    alone = {operand for operand, _ in scalars}
    own = [operand for operand, leaves in enumerate(operands) if leaves and operand not in alone]
    straight = all(len(operands[operand]) == 1 for operand in alone) and all(
        each == tuple((operand, index) for operand in own)
        for result in groups
        for index, each in enumerate(result)
    )
    return LeafMatch(groups, tuple(scalars), straight)
