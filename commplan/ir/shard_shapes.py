"""The shapes of shards, including padding.

Tree leaves are flattened, zero-padded to a multiple of the number of ranks and split; scalars are kept. An
array is split along its leading dimension, padded in the same way. Several axes split one after another,
major first, each with its own padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from commplan.ir.values import Kind, Leaf


def cut(kind: Kind, leaf: Leaf, ways: int) -> Leaf:
    """The leaf of a value of `kind` on one of `ways` ranks, which share it.

    A tree leaf of s elements becomes [ceil(s / ways)], a scalar is kept, and other leaves of shape [d, ...]
    become [ceil(d / ways), ...].
    """
    if not leaf.shape:
        return leaf
    if kind == "tree":
        return Leaf(leaf.path, (-(-leaf.size // ways),), leaf.dtype)
    return Leaf(leaf.path, (-(-leaf.shape[0] // ways), *leaf.shape[1:]), leaf.dtype)


def cut_all(kind: Kind, leaves: Iterable[Leaf], sizes: Iterable[int]) -> tuple[Leaf, ...]:
    """Split `leaves` of a value of `kind` along axes of `sizes`, one after another."""
    result = tuple(leaves)
    for ways in sizes:
        result = tuple(cut(kind, leaf, ways) for leaf in result)
    return result


def row_size(kind: Kind, leaf: Leaf, ways: int) -> int:
    """The number of elements in one of `ways` rows of `leaf`, including padding (see `schedule.Pack`)."""
    if ways == 1:
        return leaf.size
    if kind in ("array", "records") and leaf.shape:
        return -(-leaf.shape[0] // ways) * math.prod(leaf.shape[1:])
    return -(-leaf.size // ways)
