"""Hierarchical collectives with at least one `native` level, run level by level.

A level that is a whole axis is a collective over this axis. A level that is a part of an axis is a collective
within groups of its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array, lax

from commplan.collectives.program import Kind
from commplan.ir.schedule import Collective
from commplan.lowering.jax.collectives import native, programs, subgroups
from commplan.lowering.jax.collectives.bitcast import as_bits
from commplan.lowering.jax.ops import mask_to_root, pad
from commplan.lowering.jax.primitives import assume_same
from commplan.lowering.programs import NATIVE, HierarchyLevel, by_level, divisor, members, program_at


@dataclass(frozen=True)
class HierarchicalCollective:
    """A collective that runs level by level.

    Attributes:
        op: The collective.
        levels: Its levels, innermost first; at least one is native.
        ranks: The number of its ranks, the product of those of the levels.
        platform: The platform of the devices, such as cpu or gpu.
        file: The plan's file, for errors.
    """

    op: Collective
    levels: tuple[HierarchyLevel, ...]
    ranks: int
    platform: str
    file: str = ""

    def run(self, flat: Array) -> Array:
        """Run the collective on this rank's flat array.

        The operand has n*k elements for a reduce-scatter over n ranks, whose result has k. It has k elements
        for an all-gather, whose result has n*k. Results of other collectives are as long as their operand.
        """
        ranks = [level.ranks for level in self.levels]
        # Ranks are numbered row-major over the levels in this order.
        by_stride = sorted(self.levels, key=lambda level: -level.stride)
        inner_first = [by_stride.index(level) for level in self.levels]
        match self.op.kind:
            case "reduce_scatter":  # the blocks of the innermost level must be adjacent
                blocks = flat.reshape(*(level.ranks for level in by_stride), -1)
                return self._by_level(blocks.transpose(*inner_first, len(ranks)).reshape(-1))
            case "all_gather":
                blocks = self._by_level(flat).reshape(*ranks, -1)
                return blocks.transpose(*np.argsort(inner_first).tolist(), len(ranks)).reshape(-1)
            case _:
                return self._by_level(pad(flat, divisor(self.op, self.levels)))[: flat.shape[0]]

    def _by_level(self, flat: Array) -> Array:
        """Run the collectives of the levels one after the other; see `by_level`."""
        run_native = {
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
        }
        for kind, level in by_level(self.op, self.levels):
            is_native = level.algorithm == NATIVE
            flat = run_native[kind](flat, level) if is_native else self._program(kind, flat, level)
        return flat

    # native collectives of one level

    def _reduce_scatter(self, flat: Array, level: HierarchyLevel) -> Array:
        axes, groups = self._groups(level)
        return lax.psum_scatter(flat, axes, tiled=True, axis_index_groups=groups)

    def _all_gather(self, flat: Array, level: HierarchyLevel) -> Array:
        axes, groups = self._groups(level)

        def gather(moved: Array) -> Array:
            if groups is None:
                return native.all_gather_same(moved, axes)
            return lax.all_gather(moved, axes, tiled=True, axis_index_groups=groups)

        return as_bits(gather, flat) if self.platform == "cpu" else gather(flat)

    def _all_reduce(self, flat: Array, level: HierarchyLevel) -> Array:
        axes, groups = self._groups(level)
        if groups is None:
            return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[self.op.op or "sum"](flat, axes)
        return subgroups.all_reduce(flat, axes, groups, self.op.op or "sum")

    def _broadcast(self, flat: Array, level: HierarchyLevel) -> Array:
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

    def _program(self, kind: Kind, flat: Array, level: HierarchyLevel) -> Array:
        """Run one level by a chunk program. Only a level that is an axis has results typed as the same."""
        whole = flat.nbytes * (level.ranks if kind == "all_gather" else 1)
        program = program_at(level, kind, self.op, whole, self.file)
        axes, _ = self._groups(level)
        groups = programs.all_ranks(axes, level.ranks)
        if level.axis is None:
            places = level.place(np.arange(self.ranks, dtype=np.int64))
            groups = programs.RankGroups(axes, places, members(level, self.ranks))
        result = programs.run(program, flat, groups, self.op.op or "sum", on_cpu=self.platform == "cpu")
        scattered = kind == "reduce_scatter" or level.axis is None
        return result if scattered else assume_same(result, axes)

    def _groups(self, level: HierarchyLevel) -> tuple[tuple[str, ...], list[list[int]] | None]:
        """The axes of a level, and the ranks of its groups along them; None for one group of all."""
        if level.axis is not None:
            return (level.axis,), None
        return self.op.axes, members(level, self.ranks).tolist()


def broadcast(x: Array, axes: tuple[str, ...], root: int, platform: str) -> Array:
    """Broadcast the array of one rank, bit for bit.

    Except on GPUs this is a sum of integers with one nonzero term. A sum of floats would turn -0.0 into 0.0,
    and could quiet a NaN.

    Args:
        x: This rank's array.
        axes: The axes of the collective.
        root: The index of the root along `axes`, row-major, the first axis major.
        platform: The platform of the devices.
    """
    if platform == "gpu":
        return native.broadcast(x, axes, root)
    return as_bits(lambda moved: sum_from(moved, axes, root), x, always=True)


def sum_from(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """The sum over ranks of `x` of rank `root` and zeros of the other ranks; see `broadcast`."""
    return lax.psum(mask_to_root(x, lax.axis_index(axes) == root), axes)
