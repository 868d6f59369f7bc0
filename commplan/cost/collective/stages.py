"""A hierarchical collective on a layout: the ranks by level, and the collective of each stage.

`split` finds the levels of an algorithm on a layout, and `stages` lists the collectives of the levels in
order. `cost` predicts each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from commplan.collectives import registry
from commplan.collectives.program import Ints, Kind
from commplan.cost.network.network import Layout, Network
from commplan.diagnostics import CommplanError
from commplan.ir.axes import coordinates
from commplan.ir.plan import Algorithm


@dataclass(frozen=True)
class PlacedStage:
    """A collective of one level of a hierarchy.

    Attributes:
        kind: The kind of collective.
        algorithm: The algorithm, which is not hierarchical.
        layout: The groups of ranks.
        share: The ratio of the whole buffer of one of its groups to that of the hierarchy.
        root: The index of the root in its group.
    """

    kind: Kind
    algorithm: Algorithm
    layout: Layout
    share: float
    root: int


class ByLevel:
    """The ranks of a layout by level, shared by all hierarchies with the same levels.

    Attributes:
        sizes: The number of ranks at each level, innermost first.
        places: The places of the ranks, [groups, outermost, .., innermost].
    """

    def __init__(self, sizes: Sequence[int], places: Ints) -> None:
        self.sizes, self.places = tuple(sizes), places
        self._members: dict[tuple[int, tuple[tuple[int, int], ...]], Layout] = {}

    @cached_property
    def layout(self) -> Layout:
        """The ranks in the order of `registry.hierarchical`."""
        return Layout(np.ascontiguousarray(self.places).reshape(-1, math.prod(self.sizes)))

    def members(self, level: int, fixed: tuple[tuple[int, int], ...]) -> Layout:
        """The groups of ranks that differ only at `level`.

        Returns the same object for the same arguments, because candidates differ in algorithms and not in
        groups.

        Args:
            level: The number of the level, 0 for the innermost.
            fixed: Pairs of another level and an index: only ranks at this index of that level take part.
        """
        layout = self._members.get((level, fixed))
        if layout is None:
            groups = self.places
            for fixed_level, index in fixed:
                groups = np.take(groups, [index], axis=groups.ndim - 1 - fixed_level)
            groups = np.moveaxis(groups, groups.ndim - 1 - level, -1).reshape(-1, self.sizes[level])
            layout = self._members[level, fixed] = Layout(np.ascontiguousarray(groups))
        return layout


class Split(NamedTuple):
    """A hierarchy on a layout.

    Attributes:
        levels: The name of the algorithm and the number of ranks of each level, innermost first.
        ranks: The ranks by level.
    """

    levels: tuple[tuple[str, int], ...]
    ranks: ByLevel


def split(algorithm: Algorithm, layout: Layout, network: Network) -> Split | None:
    """Split a layout into the levels of a `hierarchical(..)` algorithm.

    The keys of the algorithm are all axes of the layout, or levels of the topology from the innermost to the
    outermost.

    Returns:
        The hierarchy. None if the keys are neither, or if the groups do not fill the levels evenly.
    """
    ranks = _by_level(tuple(key for key, _ in algorithm.levels), layout, network)
    if ranks is None:
        return None
    names = [level.name for _, level in algorithm.levels]
    return Split(tuple(zip(names, ranks.sizes, strict=True)), ranks)


@lru_cache(maxsize=64)
def _by_level(keys: tuple[str, ...], layout: Layout, network: Network) -> ByLevel | None:
    """The ranks by the levels `keys`, innermost first; cached, because all candidates use the same object."""
    index_of = {axis.name: index for index, axis in enumerate(layout.axes)}
    if layout.axes and sorted(keys) == sorted(index_of):
        shape = [axis.size for axis in layout.axes]
        order = [1 + index_of[key] for key in reversed(keys)]
        places = layout.groups.reshape(-1, *shape).transpose(0, *order)
        return ByLevel([shape[index_of[key]] for key in keys], places)
    sizes = _spans(keys, layout, network)
    if sizes is None:
        return None
    return ByLevel(sizes, np.sort(layout.groups, axis=1).reshape(-1, *reversed(sizes)))


def _spans(keys: Sequence[str], layout: Layout, network: Network) -> list[int] | None:
    """The size of each level in `keys`: how many of its members a group has in one member of the next level.

    None if `keys` are not levels of the network in ascending order, or if the sizes do not multiply to the
    number of ranks. Considers only the first group.
    """
    names = [level.name for level in network.levels]
    if not keys or any(key not in names for key in keys):
        return None
    indices = [names.index(key) for key in keys]
    if indices != sorted(set(indices)):
        return None
    units = [int(np.count_nonzero(np.bincount(network.units(layout.groups[0], index)))) for index in indices]
    units[0] = layout.ranks  # the innermost key stands for all levels inside it
    sizes = [inner // outer for inner, outer in zip(units, [*units[1:], 1], strict=True)]
    return sizes if math.prod(sizes) == layout.ranks else None


def stages(parts: Split, kind: Kind, root: int) -> tuple[PlacedStage, ...] | None:
    """The stages in the order of `registry.stages`; None if a level does not support its stage.

    `root` is the index of the root in a group of the whole hierarchy.
    """
    sizes = [size for _, size in parts.levels]
    try:
        level_stages = registry.stages(parts.levels, kind, root=root)
    except CommplanError:
        return None
    root_place = coordinates(root, reversed(range(len(sizes))), dict(enumerate(sizes)))
    result: list[PlacedStage] = []
    for stage in level_stages:
        # At other levels, only the ranks at the root's index take part.
        layout = parts.ranks.members(stage.level, tuple((level, root_place[level]) for level in stage.fixed))
        algorithm, share = Algorithm(stage.algorithm), float(stage.share)
        result.append(PlacedStage(stage.kind, algorithm, layout, share, stage.own_root))
    return tuple(result)
