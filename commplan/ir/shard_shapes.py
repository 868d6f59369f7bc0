"""How a leaf lies on one rank once it is cut: the one place that knows the padding.

Tree leaves are flattened, zero-padded to a multiple of the number of ranks and cut; scalars stay.
An array is cut along its leading dimension, padded likewise. Several axes cut one after another,
major first, each padding for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from commplan.ir.values import Kind, Leaf


def cut(kind: Kind, leaf: Leaf, ways: int) -> Leaf:
    """What one of `ways` ranks keeps of `leaf`.

    A tree leaf of s elements becomes [ceil(s / ways)], a scalar stays as it is; an array of
    shape [d, ...] becomes [ceil(d / ways), ...].
    """
    if not leaf.shape:
        return leaf
    if kind == "tree":
        return Leaf(leaf.path, (-(-leaf.size // ways),), leaf.dtype)
    return Leaf(leaf.path, (-(-leaf.shape[0] // ways), *leaf.shape[1:]), leaf.dtype)


def cut_all(kind: Kind, leaves: Iterable[Leaf], sizes: Iterable[int]) -> tuple[Leaf, ...]:
    """`leaves` cut along axes of `sizes`, in this order."""
    result = tuple(leaves)
    for ways in sizes:
        result = tuple(cut(kind, leaf, ways) for leaf in result)
    return result


def row_size(kind: Kind, leaf: Leaf, ways: int) -> int:
    """Elements in one of `ways` rows of `leaf`, padding included (see `schedule.Pack`)."""
    if ways == 1:
        return leaf.size
    if kind in ("array", "records") and leaf.shape:
        return -(-leaf.shape[0] // ways) * math.prod(leaf.shape[1:])
    return -(-leaf.size // ways)
