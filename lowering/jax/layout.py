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

Sizes = Mapping[str, int]


def spec(placement: Placement, *, scalar: bool = False) -> PartitionSpec:
    """The partition spec of a leaf in the global layout; `scalar` for a leaf without dimensions."""
    cut = placement.split if placement.split and not scalar else ()
    if not cut:
        return PartitionSpec(*placement.per)
    return PartitionSpec(*placement.per, cut[0] if len(cut) == 1 else cut)


def global_shape(value: Value, leaf: Leaf, sizes: Sizes) -> tuple[int, ...]:
    """The shape of `leaf` over all ranks."""
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
    whole = (spec(value.placement, scalar=not leaf.shape) for leaf in value.leaves)
    return [_compat.with_terms(each, value.placement.partial) for each in whole]
