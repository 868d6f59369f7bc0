"""A hierarchical collective on a layout: the ranks by level, and one collective for each of its stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Split:
    """The ranks of a layout by level. levels: algorithm and size, innermost first. places: of the ranks,
    [groups, outermost, .., innermost]."""

    levels: tuple[tuple[str, int], ...]
    places: Ints

    @property
    def layout(self) -> Layout:
        """The ranks in the order in which `registry.hierarchical` counts them."""
        ranks = math.prod(size for _, size in self.levels)
        return Layout(np.ascontiguousarray(self.places).reshape(-1, ranks))


def split(algorithm: Algorithm, layout: Layout, network: Network) -> Split | None:
    """The levels of `hierarchical(..)`: axes of the layout, or levels of the topology that its groups span.

    None where the keys are neither, or the groups do not fill the levels evenly.
    """
    keys = [key for key, _ in algorithm.levels]
    named = {axis.name: index for index, axis in enumerate(layout.axes)}
    if layout.axes and sorted(keys) == sorted(named):
        shape = [axis.size for axis in layout.axes]
        order = [1 + named[key] for key in reversed(keys)]
        places = layout.groups.reshape(-1, *shape).transpose(0, *order)
        sizes = [shape[named[key]] for key in keys]
    else:
        spans = _spans(keys, layout, network)
        if spans is None:
            return None
        sizes = spans
        places = np.sort(layout.groups, axis=1).reshape(-1, *reversed(sizes))
    names = [level.name for _, level in algorithm.levels]
    return Split(tuple(zip(names, sizes, strict=True)), places)


def _spans(keys: list[str], layout: Layout, network: Network) -> list[int] | None:
    """How many members of each level in `keys` a group has within one of the next, innermost first."""
    names = [level.name for level in network.levels]
    if not keys or any(key not in names for key in keys):
        return None
    at = [names.index(key) for key in keys]
    if at != sorted(set(at)):
        return None
    units = [len(np.unique(network.units(layout.groups[0], index))) for index in at]
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
        groups = parts.places
        for level in stage.fixed:  # of the others, only what stands where the root does
            groups = np.take(groups, [at[level]], axis=groups.ndim - 1 - level)
        groups = np.moveaxis(groups, groups.ndim - 1 - stage.level, -1).reshape(-1, sizes[stage.level])
        layout = Layout(np.ascontiguousarray(groups))
        result.append(
            Stage(stage.kind, Algorithm(stage.algorithm), layout, float(stage.share), stage.own_root)
        )
    return tuple(result)
