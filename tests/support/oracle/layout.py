"""Ranks and layouts: conversion between a global array and the part of each rank.

The global layout of a leaf has one leading dimension for each `per` and each `partial` axis of its value, in
the order in which the plan declares them; then the leaf itself, whose leading dimension is the concatenation
of the parts if the value is `split` (padding included).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from commplan.diagnostics import fail
from commplan.ir.schedule import Axis, Leaf, Schedule, Value
from commplan.lowering.programs import spreads

from .numbers import Array

Rank = tuple[int, ...]  # one coordinate per axis of the grid
Held = dict[Rank, tuple[Array, ...]]  # what every rank holds of one value, leaf by leaf


class Grid:
    """The ranks of a schedule: every combination of coordinates, last axis fastest.

    Servers are separate processes and not part of it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.axes: tuple[Axis, ...] = schedule.mesh_axes
        self.names = tuple(axis.name for axis in self.axes)
        self.sizes = schedule.mesh_sizes
        self.spreads = spreads(schedule)
        self.file = schedule.file
        self.ranks: tuple[Rank, ...] = tuple(itertools.product(*(range(axis.size) for axis in self.axes)))

    def size(self, axes: Sequence[str]) -> int:
        """The number of ranks along `axes`."""
        return math.prod(self.axes[self.names.index(name)].size for name in axes)

    def position(self, rank: Rank, axes: Sequence[str]) -> int:
        """The position of `rank` among the ranks along `axes`, counted row-major, first named major."""
        place = 0
        for name in axes:
            index = self.names.index(name)
            place = place * self.axes[index].size + rank[index]
        return place

    def groups(self, axes: Sequence[str]) -> list[list[Rank]]:
        """The communicators of a collective over `axes`: ranks that differ along `axes` alone, in order."""
        fixed = [name for name in self.names if name not in axes]
        groups: dict[int, list[Rank]] = {}
        for rank in self.ranks:
            groups.setdefault(self.position(rank, fixed), []).append(rank)
        return [sorted(group, key=lambda rank: self.position(rank, axes)) for group in groups.values()]


def leading(grid: Grid, value: Value) -> tuple[str, ...]:
    """The axes with a separate leading dimension in the global layout of `value`."""
    placement = value.placement
    return tuple(name for name in grid.names if name in placement.per or name in placement.partial)


def global_shape(grid: Grid, value: Value, leaf: Leaf) -> tuple[int, ...]:
    """The shape of `leaf` in the global layout."""
    dims = tuple(grid.size((name,)) for name in leading(grid, value))
    if not value.placement.split or not leaf.shape:  # scalars are never cut
        return (*dims, *leaf.shape)
    return (*dims, leaf.shape[0] * grid.size(value.placement.split), *leaf.shape[1:])


def spread(grid: Grid, value: Value, leaves: Sequence[Array]) -> Held:
    """Each rank's part of `value`, from its leaves in the global layout."""
    if len(leaves) != len(value.leaves):
        fail("CP0805", f"`{value.id}` has {len(value.leaves)} leaves, not {len(leaves)}")
    for leaf, array in zip(value.leaves, leaves, strict=True):
        shape = global_shape(grid, value, leaf)
        if np.shape(array) != shape:
            where = f" at `{leaf.path}`" if leaf.path else ""
            fail("CP0805", f"`{value.id}`{where} has the shape {shape}, not {np.shape(array)}",
                 f"its placement is `{value.placement}`: one leading dimension for each `per` or"
                 " `partial` axis, and `split` leaves as one padded array")  # fmt: skip
    pairs = list(zip(value.leaves, leaves, strict=True))
    return {
        rank: tuple(np.asarray(array[_part(grid, value, leaf, rank)]) for leaf, array in pairs)
        for rank in grid.ranks
    }


def _part(grid: Grid, value: Value, leaf: Leaf, rank: Rank) -> tuple[int | slice, ...]:
    """The index of the part of `rank` in `leaf` in the global layout."""
    index = tuple(rank[grid.names.index(name)] for name in leading(grid, value))
    if not value.placement.split or not leaf.shape:
        return index
    place, rows = grid.position(rank, value.placement.split), leaf.shape[0]
    return (*index, slice(place * rows, (place + 1) * rows))


def collect(grid: Grid, value: Value, buffers: Held) -> list[Array]:
    """The leaves of `value` in the global layout, from the parts of all ranks.

    Raises:
        AssertionError: if ranks along an axis that the placement calls `same` hold different data.
    """
    answer: list[Array] = []
    for number, leaf in enumerate(value.leaves):
        whole = np.zeros(global_shape(grid, value, leaf), buffers[grid.ranks[0]][number].dtype)
        arrays: dict[str, Array] = {}
        for rank in grid.ranks:
            part, array = _part(grid, value, leaf, rank), buffers[rank][number]
            first = arrays.setdefault(str(part), array)
            if first.tobytes() != array.tobytes():
                message = f"`{value.id}` is placed `{value.placement}`, but rank {rank} holds other data"
                raise AssertionError(f"{message} than a rank that should have the same")
            whole[part] = array
        answer.append(whole)
    return answer


def pad_rows(array: Array, ways: int) -> Array:
    """`array` with zero rows added until its leading dimension is a multiple of `ways`."""
    missing = -array.shape[0] % ways
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])


def cut(array: Array, ways: int, place: int, *, tree: bool) -> Array:
    """Piece `place` of `ways` equal ones. A leaf of a tree is flattened first; a scalar stays whole."""
    if array.ndim == 0:
        return array
    padded = pad_rows(array.reshape(-1) if tree else array, ways)
    rows = padded.shape[0] // ways
    return padded[place * rows : (place + 1) * rows]


def join(pieces: Sequence[Array], leaf: Leaf) -> Array:
    """The way back from `cut`: the pieces in rank order, padding dropped, in the shape of `leaf`."""
    if not leaf.shape:
        return pieces[0]
    flat = np.concatenate([piece.reshape(-1) for piece in pieces])
    return flat[: leaf.size].reshape(leaf.shape)
