"""Hierarchical collectives under JAX of which a level is `native`, level by level.

A level that is a whole axis is one collective over it. A level that is a part of an axis has groups of the
axis' ranks; `lax` gathers and scatters within groups, and so an all-reduce is made of the two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from commplan.collectives.program import Kind
from commplan.ir.schedule import Collective
from commplan.lowering.jax import _compat, programs
from commplan.lowering.jax.bits import as_bits
from commplan.lowering.jax.ops import pad
from commplan.lowering.jax.untyped import jnp, lax
from commplan.lowering.programs import NATIVE, Level, members, program_at

Array = Any


@dataclasses.dataclass(frozen=True)
class Stairs:
    """The levels of the collective `op` over `ranks` ranks, innermost first."""

    op: Collective
    own: tuple[Level, ...]
    ranks: int
    platform: str
    file: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether every level is an axis, and native."""
        return all(level.axis is not None and level.algorithm == NATIVE for level in self.own)

    def all_reduce(self, flat: Array) -> Array:
        """[S] -> [S]. A sum is scattered inwards, reduced outermost and gathered; each level outside moves
        a part of the bytes. A maximum or minimum, which `lax` does not scatter, moves all of them."""
        if self.op.op != "sum":
            for level in self.own:
                flat = self._all_reduce(flat, level)
            return flat
        *inner, outer = self.own
        size = flat.shape[0]
        flat = pad(flat, math.prod(level.ranks for level in inner))
        for level in inner:
            flat = self._reduce_scatter(flat, level)
        flat = self._all_reduce(flat, outer)
        for level in reversed(inner):
            flat = self._all_gather(flat, level)
        return flat[:size]

    def reduce_scatter(self, flat: Array) -> Array:
        """[n*k] -> [k]: innermost first, its blocks brought together before."""
        flat = flat.reshape(*self._shape, -1).transpose(*self._inner_first, len(self.own)).reshape(-1)
        for level in self.own:
            flat = self._reduce_scatter(flat, level)
        return flat

    def all_gather(self, flat: Array) -> Array:
        """[k] -> [n*k]: outermost first, the way back from `reduce_scatter`."""
        for level in reversed(self.own):
            flat = self._all_gather(flat, level)
        by_level = flat.reshape(*(level.ranks for level in self.own), -1)
        back = np.argsort(self._inner_first).tolist()
        return by_level.transpose(*back, len(self.own)).reshape(-1)

    def broadcast(self, flat: Array, root: int) -> Array:
        """Outermost first: after it every group inside has a rank that knows."""
        for level in reversed(self.own):
            flat = self._broadcast(flat, level, root // level.stride % level.ranks)
        return flat

    @property
    def _major_first(self) -> list[Level]:
        """The levels in the order in which they count the ranks."""
        return sorted(self.own, key=lambda level: -level.stride)

    @property
    def _shape(self) -> list[int]:
        return [level.ranks for level in self._major_first]

    @property
    def _inner_first(self) -> list[int]:
        """Where the levels, innermost first, stand in the order in which they count the ranks."""
        order = self._major_first
        return [order.index(level) for level in self.own]

    # one level

    def _reduce_scatter(self, flat: Array, level: Level) -> Array:
        if level.algorithm != NATIVE:
            return self._program("reduce_scatter", flat, level)
        axes, groups = self._groups(level)
        return lax.psum_scatter(flat, axes, tiled=True, axis_index_groups=groups)

    def _all_gather(self, flat: Array, level: Level) -> Array:
        if level.algorithm != NATIVE:
            return self._program("all_gather", flat, level)
        axes, groups = self._groups(level)

        def gather(moved: Array) -> Array:
            if groups is None:
                return _compat.all_gather_same(moved, axes)
            return lax.all_gather(moved, axes, tiled=True, axis_index_groups=groups)

        return as_bits(gather, flat) if self.platform == "cpu" else gather(flat)

    def _all_reduce(self, flat: Array, level: Level) -> Array:
        if level.algorithm != NATIVE:
            return self._program("all_reduce", flat, level)
        axes, groups = self._groups(level)
        if groups is None:
            return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[self.op.op or "sum"](flat, axes)
        size = flat.shape[0]
        if self.op.op in ("max", "min"):  # all values are brought together
            rows = self._all_gather(flat, level).reshape(level.ranks, size)
            return rows.max(0) if self.op.op == "max" else rows.min(0)
        return self._all_gather(self._reduce_scatter(pad(flat, level.ranks), level), level)[:size]

    def _broadcast(self, flat: Array, level: Level, root: int) -> Array:
        if level.algorithm != NATIVE:
            return self._program("broadcast", flat, level, root)
        axes, groups = self._groups(level)
        if groups is None:
            return broadcast(flat, axes, root, self.platform)
        size, here = flat.shape[0], self._place(level) == root

        def from_root(moved: Array) -> Array:
            sent = pad(jnp.where(here, moved, jnp.zeros_like(moved)), level.ranks)
            mine = lax.psum_scatter(sent, axes, tiled=True, axis_index_groups=groups)
            return lax.all_gather(mine, axes, tiled=True, axis_index_groups=groups)[:size]

        return as_bits(from_root, flat, always=True)

    def _program(self, kind: Kind, flat: Array, level: Level, root: int = 0) -> Array:
        whole = flat.nbytes * (level.ranks if kind == "all_gather" else 1)
        program = program_at(level, kind, self.op, whole, root, self.file)
        axes, _ = self._groups(level)
        team = programs.everyone(axes, level.ranks)
        if level.axis is None:
            places = np.arange(self.ranks, dtype=np.int64) // level.stride % level.ranks
            team = programs.Team(axes, places, members(level, self.ranks))
        made = programs.run(program, flat, team, self.op.op or "sum", on_cpu=self.platform == "cpu")
        scattered = kind == "reduce_scatter" or level.axis is None
        return made if scattered else _compat.assume_same(made, axes)

    def _groups(self, level: Level) -> tuple[tuple[str, ...], list[list[int]] | None]:
        if level.axis is not None:
            return (level.axis,), None
        return self.op.axes, members(level, self.ranks).tolist()

    def _place(self, level: Level) -> Array:
        return lax.axis_index(self.op.axes) // level.stride % level.ranks


def broadcast(x: Array, axes: tuple[str, ...], root: int, platform: str) -> Array:
    """`x` of rank `root`, counted row-major over `axes`, bit for bit.

    Where the backend has no broadcast this is a sum of integers of which all but one are zero:
    a sum of floats would turn -0.0 into 0.0 and might quiet a NaN.
    """
    if platform == "gpu":
        return _compat.broadcast_native(x, axes, root)
    return as_bits(lambda moved: sum_from(moved, axes, root), x, always=True)


def sum_from(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """The sum of `x` of rank `root` and zeros."""
    return lax.psum(jnp.where(lax.axis_index(axes) == root, x, jnp.zeros_like(x)), axes)
