"""Hierarchical collectives under JAX of which a level is `native`, level by level.

A level that is a whole axis is one collective over it. A level that is a part of an axis is one within groups
of the axis' ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from commplan.collectives.program import Kind
from commplan.ir.schedule import Collective
from commplan.lowering.jax.collectives import native, programs, subgroups
from commplan.lowering.jax.collectives.bitcast import as_bits
from commplan.lowering.jax.ops import mask_to_root, pad
from commplan.lowering.jax.primitives import assume_same
from commplan.lowering.jax.typing_shim import jnp, lax
from commplan.lowering.programs import NATIVE, ProgramLevel, by_level, members, program_at

Array = Any


@dataclass(frozen=True)
class HierarchicalCollective:
    """The levels of the collective `op` over `ranks` ranks, innermost first."""

    op: Collective
    own: tuple[ProgramLevel, ...]
    ranks: int
    platform: str
    file: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether every level is an axis, and native."""
        return all(level.axis is not None and level.algorithm == NATIVE for level in self.own)

    def is_one_for(self, x: Array) -> bool:
        """Whether an all-reduce of `x` is one of XLA's own over all levels."""
        extreme = self.op.op != "sum" and self.is_plain
        return extreme or x.ndim == 0 or x.dtype == jnp.bool_

    def run(self, flat: Array) -> Array:
        """What the collective makes of [S], of [n*k] for a reduce-scatter, of [k] for an all-gather."""
        ranks = [level.ranks for level in self.own]
        by_stride = sorted(self.own, key=lambda level: -level.stride)  # the order in which ranks count
        inner_first = [by_stride.index(level) for level in self.own]
        match self.op.kind:
            case "reduce_scatter":  # the blocks of the innermost level are brought together
                blocks = flat.reshape(*(level.ranks for level in by_stride), -1)
                return self._by_level(blocks.transpose(*inner_first, len(ranks)).reshape(-1))
            case "all_gather":
                blocks = self._by_level(flat).reshape(*ranks, -1)
                return blocks.transpose(*np.argsort(inner_first).tolist(), len(ranks)).reshape(-1)
            case "all_reduce" if self.op.op == "sum":
                return self._by_level(pad(flat, math.prod(ranks[:-1])))[: flat.shape[0]]
            case _:
                return self._by_level(flat)

    def _by_level(self, flat: Array) -> Array:
        native = {
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
        }
        for kind, level in by_level(self.op, self.own):
            own = level.algorithm == NATIVE
            flat = native[kind](flat, level) if own else self._program(kind, flat, level)
        return flat

    # XLA's own at one level

    def _reduce_scatter(self, flat: Array, level: ProgramLevel) -> Array:
        axes, groups = self._groups(level)
        return lax.psum_scatter(flat, axes, tiled=True, axis_index_groups=groups)

    def _all_gather(self, flat: Array, level: ProgramLevel) -> Array:
        axes, groups = self._groups(level)

        def gather(moved: Array) -> Array:
            if groups is None:
                return native.all_gather_same(moved, axes)
            return lax.all_gather(moved, axes, tiled=True, axis_index_groups=groups)

        return as_bits(gather, flat) if self.platform == "cpu" else gather(flat)

    def _all_reduce(self, flat: Array, level: ProgramLevel) -> Array:
        axes, groups = self._groups(level)
        if groups is None:
            return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[self.op.op or "sum"](flat, axes)
        return subgroups.all_reduce(flat, axes, groups, self.op.op or "sum")

    def _broadcast(self, flat: Array, level: ProgramLevel) -> Array:
        axes, groups = self._groups(level)
        root = level.place(self.op.root or 0)
        if groups is None:
            return broadcast(flat, axes, root, self.platform)
        if self.platform == "gpu":
            return subgroups.broadcast(flat, axes, groups, root)

        def from_root(moved: Array) -> Array:
            is_root = level.place(lax.axis_index(axes)) == root
            return subgroups.all_reduce(mask_to_root(moved, is_root), axes, groups)

        return as_bits(from_root, flat, always=True)

    def _program(self, kind: Kind, flat: Array, level: ProgramLevel) -> Array:
        whole = flat.nbytes * (level.ranks if kind == "all_gather" else 1)
        program = program_at(level, kind, self.op, whole, self.file)
        axes, _ = self._groups(level)
        team = programs.everyone(axes, level.ranks)
        if level.axis is None:
            places = level.place(np.arange(self.ranks, dtype=np.int64))
            team = programs.ProgramRanks(axes, places, members(level, self.ranks))
        result = programs.run(program, flat, team, self.op.op or "sum", on_cpu=self.platform == "cpu")
        scattered = kind == "reduce_scatter" or level.axis is None
        return result if scattered else assume_same(result, axes)

    def _groups(self, level: ProgramLevel) -> tuple[tuple[str, ...], list[list[int]] | None]:
        if level.axis is not None:
            return (level.axis,), None
        return self.op.axes, members(level, self.ranks).tolist()


def broadcast(x: Array, axes: tuple[str, ...], root: int, platform: str) -> Array:
    """`x` of rank `root`, counted row-major over `axes`, bit for bit.

    Where the backend has no broadcast this is a sum of integers of which all but one are zero:
    a sum of floats would turn -0.0 into 0.0 and might quiet a NaN.
    """
    if platform == "gpu":
        return native.broadcast(x, axes, root)
    return as_bits(lambda moved: sum_from(moved, axes, root), x, always=True)


def sum_from(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """The sum of `x` of rank `root` and zeros."""
    return lax.psum(mask_to_root(x, lax.axis_index(axes) == root), axes)
