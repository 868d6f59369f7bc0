"""A hierarchical collective on a layout: the ranks by level, and one collective for each of its stages."""

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
class Stage:
    """A collective of one level. share: the bytes of the whole buffer of one of its groups, as a share of
    those of the hierarchy."""

    kind: Kind
    algorithm: Algorithm
    layout: Layout
    share: float
    root: int


class ByLevel:
    """The ranks of a layout by level, whatever the algorithms of the levels are.

    sizes: ranks of each level, innermost first. places: of the ranks, [groups, outermost, .., innermost].
    """

    def __init__(self, sizes: Sequence[int], places: Ints) -> None:
        self.sizes, self.places = tuple(sizes), places
        self._members: dict[tuple[int, tuple[tuple[int, int], ...]], Layout] = {}

    @cached_property
    def layout(self) -> Layout:
        """The ranks in the order in which `registry.hierarchical` counts them."""
        return Layout(np.ascontiguousarray(self.places).reshape(-1, math.prod(self.sizes)))

    def members(self, level: int, fixed: tuple[tuple[int, int], ...]) -> Layout:
        """The groups of ranks that differ at `level` alone: the same object each time, because candidates
        differ in algorithms and not in groups. fixed: levels at which only the ranks at one place take part,
        and that place."""
        layout = self._members.get((level, fixed))
        if layout is None:
            groups = self.places
            for other, place in fixed:
                groups = np.take(groups, [place], axis=groups.ndim - 1 - other)
            groups = np.moveaxis(groups, groups.ndim - 1 - level, -1).reshape(-1, self.sizes[level])
            layout = self._members[level, fixed] = Layout(np.ascontiguousarray(groups))
        return layout


class Split(NamedTuple):
    """A hierarchy on a layout. levels: algorithm and size, innermost first."""

    levels: tuple[tuple[str, int], ...]
    ranks: ByLevel


def split(algorithm: Algorithm, layout: Layout, network: Network) -> Split | None:
    """The levels of `hierarchical(..)`: axes of the layout, or levels of the topology that its groups span.

    None where the keys are neither, or the groups do not fill the levels evenly.
    """
    ranks = _by_level(tuple(key for key, _ in algorithm.levels), layout, network)
    if ranks is None:
        return None
    names = [level.name for _, level in algorithm.levels]
    return Split(tuple(zip(names, ranks.sizes, strict=True)), ranks)


@lru_cache(maxsize=64)
def _by_level(keys: tuple[str, ...], layout: Layout, network: Network) -> ByLevel | None:
    named = {axis.name: index for index, axis in enumerate(layout.axes)}
    if layout.axes and sorted(keys) == sorted(named):
        shape = [axis.size for axis in layout.axes]
        order = [1 + named[key] for key in reversed(keys)]
        places = layout.groups.reshape(-1, *shape).transpose(0, *order)
        return ByLevel([shape[named[key]] for key in keys], places)
    sizes = _spans(keys, layout, network)
    if sizes is None:
        return None
    return ByLevel(sizes, np.sort(layout.groups, axis=1).reshape(-1, *reversed(sizes)))


def _spans(keys: Sequence[str], layout: Layout, network: Network) -> list[int] | None:
    """How many members of each level in `keys` a group has within one of the next, innermost first."""
    names = [level.name for level in network.levels]
    if not keys or any(key not in names for key in keys):
        return None
    at = [names.index(key) for key in keys]
    if at != sorted(set(at)):
        return None
    units = [int(np.count_nonzero(np.bincount(network.units(layout.groups[0], index)))) for index in at]
    units[0] = layout.ranks  # what the innermost level named holds, lies there
    sizes = [inner // outer for inner, outer in zip(units, [*units[1:], 1], strict=True)]
    return sizes if math.prod(sizes) == layout.ranks else None


def stages(parts: Split, kind: Kind, root: int) -> tuple[Stage, ...] | None:
    """The stages in order, as `registry.stages` says; None where a level cannot do its part."""
    sizes = [size for _, size in parts.levels]
    try:
        plan = registry.stages(parts.levels, kind, root=root)
    except CommplanError:
        return None
    at = coordinates(root, reversed(range(len(sizes))), dict(enumerate(sizes)))
    result: list[Stage] = []
    for stage in plan:
        # Of the other levels, only the ranks at the place of the root take part.
        layout = parts.ranks.members(stage.level, tuple((level, at[level]) for level in stage.fixed))
        algorithm, share = Algorithm(stage.algorithm), float(stage.share)
        result.append(Stage(stage.kind, algorithm, layout, share, stage.own_root))
    return tuple(result)
