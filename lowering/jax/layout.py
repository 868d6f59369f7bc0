"""Partition specs and global shapes of values, from their placements.

Outside of a shard_map a value is one global array per leaf. `same` is `P()`. `per A` adds one leading
dimension of A's size for each such axis, in plan order. `split A, B` shards the leading dimension along A,
then B. Leaves of split trees are flattened and padded; scalar leaves are never split.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from commplan.ir.schedule import Leaf, Value
from commplan.ir.types import Placement
from commplan.lowering.jax import _compat

Sizes = Mapping[str, int]  # the size of each axis by name


def spec(placement: Placement, *, scalar: bool = False) -> PartitionSpec:
    """The partition spec of a leaf in the global layout, without unreduced axes.

    Args:
        placement: The placement of the value.
        scalar: Whether the leaf has no dimensions, so that it is not split.
    """
    split = () if scalar else placement.split
    if not split:
        return PartitionSpec(*placement.per)
    return PartitionSpec(*placement.per, split[0] if len(split) == 1 else split)


def global_shape(value: Value, leaf: Leaf, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the global array of a leaf.

    Args:
        value: The value, whose placement determines the layout.
        leaf: The leaf, with the shape of one rank's array.
        sizes: The sizes of the axes.
    """
    lead = tuple(sizes[axis] for axis in value.placement.per)
    if not value.placement.split or not leaf.shape:
        return (*lead, *leaf.shape)
    rows = leaf.shape[0]
    for axis in value.placement.split:
        rows *= sizes[axis]
    return (*lead, rows, *leaf.shape[1:])


def varying(value: Value, leaf: Leaf) -> tuple[str, ...]:
    """The axes along which ranks may have different data in `leaf`. A scalar leaf is never split."""
    placement = value.placement
    return placement.per + placement.partial + (placement.split if leaf.shape else ())


def leaf_specs(value: Value) -> list[PartitionSpec]:
    """One spec for each leaf of `value`; partial values are unreduced."""
    specs = (spec(value.placement, scalar=not leaf.shape) for leaf in value.leaves)
    return [_compat.with_terms(leaf_spec, value.placement.partial) for leaf_spec in specs]
