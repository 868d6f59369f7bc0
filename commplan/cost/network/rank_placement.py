"""Derives the levels of axes from the places that a launcher gave to the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from commplan.cost.network.network import Network, places_of
from commplan.ir.axes import coordinates
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis, Spread
from commplan.topology import Topology


def spread_as(axes: tuple[Axis, ...], topology: Topology, places: Sequence[int]) -> tuple[Axis, ...] | None:
    """Find levels of the axes that place every rank as in `places`, up to an offset of all places.

    Args:
        axes: The axes of a schedule. Server axes are returned without levels.
        topology: The topology.
        places: The place of each rank, row-major over the axes of the mesh.

    Returns:
        The axes with their levels. The levels of an axis are in index order, the fastest first: eight ranks
        on two racks are host x 4, rack x 2 if four neighbors share a rack, and rack x 2, host x 4 if they
        alternate. None if no levels place the ranks so, or if the number of places is not that of the ranks.
    """
    mesh_axes = [axis for axis in axes if axis.kind is not AxisKind.SERVER]
    sizes = [axis.size for axis in mesh_axes]
    if math.prod(sizes) != len(places):
        return None
    grid = np.asarray(places, np.int64).reshape(sizes)
    spreads: dict[str, tuple[Spread, ...]] = {}
    for index, axis in enumerate(mesh_axes):
        places_along = grid[tuple(slice(None) if i == index else 0 for i in range(len(sizes)))]
        digits = _digits([int(place) for place in places_along], topology)
        if digits is None:
            return None
        spreads[axis.name] = digits
    placed = tuple(replace(axis, levels=spreads.get(axis.name, ())) for axis in axes)
    actual = places_of(Network.for_topology(topology), [axis for axis in placed if axis.name in spreads])
    is_equal = np.array_equal(np.asarray(actual).ravel() - actual.ravel()[0], grid.ravel() - grid.ravel()[0])
    return placed if is_equal else None


def _digits(places_along: list[int], topology: Topology) -> tuple[Spread, ...] | None:
    """The levels of one axis, the fastest first, like the digits of its index in a mixed radix.

    Args:
        places_along: The place of each position along the axis, at position 0 of all others.
        topology: The topology.

    Returns:
        The levels and their counts. None if the places are not of this form.
    """
    spreads: list[Spread] = []
    step = 1  # the number of positions that the levels found so far cover
    while step < len(places_along):
        change = _difference(places_along[0], places_along[step], topology)
        if list(change.values()) != [1]:
            return None
        (level,) = change
        count = 1
        while step * count < len(places_along):
            if _difference(places_along[0], places_along[step * count], topology) != {level: count}:
                break
            count += 1
        if len(places_along) % (step * count):
            return None
        spreads.append(Spread(level, count))
        step *= count
    return tuple(spreads) or (Spread(topology.levels[0].name, 1),)


def _difference(start: int, end: int, topology: Topology) -> dict[str, int]:
    """By level: the difference of the indices of two places, for the levels at which they differ."""
    sizes = {level.name: level.count for level in topology.levels}
    first, second = (coordinates(place, reversed(sizes), sizes) for place in (start, end))
    return {name: second[name] - first[name] for name in sizes if first[name] != second[name]}
