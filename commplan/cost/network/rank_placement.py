"""Axes from the places that ranks really have: what a launcher did, said in levels."""

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
    """`axes` with levels that put every rank where it is; None where no levels do.

    places: of each rank, row-major over the axes. The levels of an axis are listed as its index counts
    through them, the fastest first: of eight ranks on two racks host x 4, rack x 2 where four neighbours
    share a rack, and rack x 2, host x 4 where they are dealt out in turn.
    """
    ranked = [axis for axis in axes if axis.kind is not AxisKind.SERVER]
    sizes = [axis.size for axis in ranked]
    if math.prod(sizes) != len(places):
        return None
    grid = np.asarray(places, np.int64).reshape(sizes)
    spreads: dict[str, tuple[Spread, ...]] = {}
    for index, axis in enumerate(ranked):
        line = grid[tuple(slice(None) if i == index else 0 for i in range(len(sizes)))]
        digits = _digits([int(place) for place in line], topology)
        if digits is None:
            return None
        spreads[axis.name] = digits
    placed = tuple(replace(axis, levels=spreads.get(axis.name, ())) for axis in axes)
    standing = places_of(Network.of(topology), [axis for axis in placed if axis.name in spreads])
    same = np.array_equal(np.asarray(standing).ravel() - standing.ravel()[0], grid.ravel() - grid.ravel()[0])
    return placed if same else None


def _digits(line: list[int], topology: Topology) -> tuple[Spread, ...] | None:
    """How the places in `line` count through the levels, the fastest first."""
    spreads: list[Spread] = []
    step = 1
    while step < len(line):
        change = _moved(line[0], line[step], topology)
        if list(change.values()) != [1]:
            return None
        (level,) = change
        count = 1
        while step * count < len(line):
            if _moved(line[0], line[step * count], topology) != {level: count}:
                break
            count += 1
        if len(line) % (step * count):
            return None
        spreads.append(Spread(level, count))
        step *= count
    return tuple(spreads) or (Spread(topology.levels[0].name, 1),)


def _moved(start: int, end: int, topology: Topology) -> dict[str, int]:
    """By how much the index at each level differs, where it does."""
    sizes = {level.name: level.count for level in topology.levels}
    first, second = (coordinates(place, reversed(sizes), sizes) for place in (start, end))
    return {name: second[name] - first[name] for name in sizes if first[name] != second[name]}
