"""The HLO collectives expected for a phase of a schedule.

`expected` follows the lowering to JAX. `native` becomes one HLO collective per array; `hierarchical` with
native levels becomes reduce-scatters inwards, an all-reduce at the outermost level, and all-gathers outwards;
a chunk program becomes the permutes of its rounds. A broadcast is XLA's own on GPUs, and on CPUs an
all-reduce of the root's data, as integers, and zeros. XLA:CPU sums bf16 as f32, and moves other 16-bit floats
as u16. Groups of one rank need no collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from commplan.collectives.program import ChunkProgram, Ints, Kind
from commplan.diagnostics import Span
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.axes import groups as groups_along
from commplan.ir.collective_kinds import REDUCING
from commplan.ir.schedule import Collective, Leaf, Op, Phase, Schedule, Spread
from commplan.ir.types import DType
from commplan.lowering.hlo.reader import Tensor
from commplan.lowering.hlo.step import Platform
from commplan.lowering.permutes import permute_rounds, stretches
from commplan.lowering.programs import (
    NATIVE,
    HierarchyLevel,
    by_level,
    divisor,
    members,
    native_kind,
    on_leaf,
    program_at,
    spreads,
    under_xla,
)

# HLO's name of each element type.
_HLO = {
    DType.F32: "f32", DType.BF16: "bf16", DType.F16: "f16", DType.F64: "f64", DType.I32: "s32",
    DType.I64: "s64", DType.U8: "u8", DType.BOOL: "pred", DType.I8: "s8", DType.I16: "s16",
    DType.U16: "u16", DType.U32: "u32",
}  # fmt: skip

Groups = tuple[tuple[int, ...], ...]  # the ranks of each group; for a permute, (source, target) pairs


class MeshLike(Protocol):
    """An object with the sizes of its axes, in the order of device numbering."""

    @property
    def shape(self) -> Mapping[Any, int]:
        """The size of each axis by name, the major axis first."""
        ...


class Expected(msgspec.Struct, frozen=True):
    """A planned collective as represented in HLO.

    Attributes:
        kind: Kind of the collective, as in `CompiledCollective`.
        op: Reduction: `sum`, `max` or `min`; None if it does not reduce.
        dtype: HLO's name of the element type.
        count: Number of elements that each rank contributes.
        groups: Participating ranks; for a permute, (source, target) pairs.
        axes: The axes of the plan over which it communicates.
        span: The location in the plan.
        phase: The phase; empty until `expected` sets it.
        free: Whether no op is ordered with respect to it and it moves no packed buffer. If so, the compiler
            may merge it with others, and move it.
    """

    kind: str
    op: str | None
    dtype: str
    count: int
    groups: Groups
    axes: tuple[str, ...]
    span: Span
    phase: str = ""
    free: bool = False

    @property
    def scope(self) -> tuple[str, int]:
        """The phase and the plan line that request it."""
        return (self.phase, self.span.line)

    @property
    def nbytes(self) -> int:
        """Bytes that one rank contributes."""
        return Tensor(self.dtype, (self.count,)).nbytes

    def __str__(self) -> str:
        operation = f"{self.kind}({self.op})" if self.op else self.kind
        return f"{operation} {self.dtype}[{self.count}] over {', '.join(self.axes)} (line {self.span.line})"


def groups_of(axes: Sequence[str], mesh: MeshLike) -> Groups:
    """The ranks of each communicator over `axes`, row-major with the first axis major.

    Ranks are numbered as the mesh counts its devices, row-major over its axes in order.
    """
    return tuple(groups_along(axes, mesh.shape))


def expected(
    schedule: Schedule, phase: str, mesh: MeshLike, platform: Platform = "cpu"
) -> tuple[Expected, ...]:
    """The HLO collectives of a call of a phase, in order of issue.

    Collectives that nothing needs, that have one rank, or that move no elements are omitted.

    Args:
        schedule: The schedule.
        phase: The name of the phase.
        mesh: The mesh; it may have further axes.
        platform: The platform that the step is compiled for.

    Raises:
        CommplanError: CP0817 for an unknown phase; and the errors of `programs.program_of`.
    """
    body = schedule.phase(phase)
    values = {value.id: value for value in (*schedule.entry, *body.values)}
    collectives: list[Expected] = []
    followed = {ref for op in body.ops for ref in op.after}
    for op in computed(body):
        if isinstance(op, Collective):
            value = values[op.operand]
            free = not op.after and op.result not in followed and value.kind != "flat"
            for leaf in value.leaves:
                lowering = LeafLowering(op, leaf, mesh, spreads(schedule), platform)
                items = lowering.collectives(value.kind == "array")
                collectives += [replace(item, free=free) for item in items]
    return tuple(replace(item, phase=phase) for item in collectives if len(item.groups[0]) > 1 and item.count)


def computed(phase: Phase) -> tuple[Op, ...]:
    """The ops that a call of `phase` executes: those that outputs and states need, without input stages."""
    outputs = [binding for binding in phase.outputs if not binding.source_only]
    results = [binding.value for binding in (*outputs, *phase.updates)]
    return DefUse(phase.ops).ancestors(results, {binding.value for binding in phase.takes})


class LeafLowering(NamedTuple):
    """A collective on one leaf. Its methods list HLO collectives as the lowering to JAX makes them.

    Attributes:
        op: The collective.
        leaf: The leaf of the operand.
        mesh: The mesh; it may have further axes.
        spread: The levels of the topology that each axis of the mesh spans.
        platform: `cpu` or `gpu`.
    """

    op: Collective
    leaf: Leaf
    mesh: MeshLike
    spread: Mapping[str, tuple[Spread, ...]]
    platform: str

    @property
    def ways(self) -> int:
        """The number of ranks that communicate."""
        return math.prod(self.mesh.shape[axis] for axis in self.op.axes)

    def collectives(self, is_array: bool) -> list[Expected]:
        """The collectives for the leaf of an array (`is_array`) or of a tree; empty if it needs none."""
        collective = on_leaf(self.op, self.leaf, self.ways, is_array=is_array)
        if collective is None:
            return []
        op, count = collective
        return self._replace(op=op).array(count)

    def array(self, count: int) -> list[Expected]:
        """The collectives for an array of `count` elements on each rank."""
        op, leaf, sizes = self.op, self.leaf, self.mesh.shape
        size = count * self.ways if op.kind == "all_gather" else count
        is_divisible = bool(leaf.shape) and leaf.dtype is not DType.BOOL
        form = under_xla(op, sizes, self.spread, size * leaf.dtype.nbytes, is_divisible=is_divisible)
        everyone = np.arange(self.ways, dtype=np.int64)[None]
        if form is None:
            return self.native(native_kind(op), count, op.axes, everyone, op.root or 0)
        if isinstance(form, ChunkProgram):
            return self.permutes(form, size, everyone)
        multiple = divisor(op, form)
        count = -(-count // multiple) * multiple
        collectives: list[Expected] = []
        for kind, level in by_level(op, form):
            collectives += self.level(kind, count, level)
            if kind == "reduce_scatter":
                count //= level.ranks
            elif kind == "all_gather":
                count *= level.ranks
        return collectives

    def level(self, kind: Kind, count: int, level: HierarchyLevel) -> list[Expected]:
        """The collectives of one level of a hierarchical collective.

        Args:
            kind: The collective that the level runs; see `by_level`.
            count: The number of elements that each rank contributes.
            level: The level.
        """
        op = self.op
        groups = members(level, self.ways)
        root = level.place(self.op.root or 0)
        if level.algorithm != NATIVE:
            size = count * level.ranks if kind == "all_gather" else count
            program = program_at(level, kind, op, size * self.leaf.dtype.nbytes)
            return self.permutes(program, size, groups)
        if level.axis is not None:
            everyone = np.arange(level.ranks, dtype=np.int64)[None]
            return self.native(kind, count, (level.axis,), everyone, root)
        return self.native(kind, count, op.axes, groups, root)

    def permutes(self, program: ChunkProgram, size: int, groups: Ints) -> list[Expected]:
        """The permutes of a program; those of a loop are listed once.

        Args:
            program: The program.
            size: The number of elements of the whole buffer.
            groups: The ranks of each group that runs the program, out of those over the axes of the op;
                [groups, ranks of the program].
        """
        dtype = self._dtype("permute")
        if self.leaf.dtype is DType.BOOL:
            dtype = "u8"  # element type of the combining op
        within = [group for ranks in groups_of(self.op.axes, self.mesh) for group in np.array(ranks)[groups]]
        permutes: list[Expected] = []
        for stretch in stretches(permute_rounds(program, size)):
            for permute in stretch[0].permutes:
                ends = ((group[src], group[dst]) for group in within for src, dst in permute.pairs)
                pairs = tuple((int(src), int(dst)) for src, dst in ends)
                count = sum(part.length for part in permute.parts)
                permutes.append(Expected("permute", None, dtype, count, pairs, self.op.axes, self.op.span))
        return permutes

    def native(
        self, kind: str, count: int, axes: tuple[str, ...], groups: Ints, root: int = 0
    ) -> list[Expected]:
        """XLA's native collective, as a list of one item.

        Args:
            kind: The kind of collective.
            count: The number of elements that each rank contributes.
            axes: The axes of the collective.
            groups: The ranks of each group, out of those over `axes`; [groups, ranks].
            root: The index of the root in each group; for a shift, the distance.
        """
        communicators = groups_of(axes, self.mesh)
        within = tuple(
            tuple(int(r) for r in np.array(ranks)[group]) for ranks in communicators for group in groups
        )
        operation = self.op.op if kind in REDUCING else None
        dtype = self._dtype(kind)
        kind = "all_to_all" if kind == "swap" else kind
        if kind == "shift":
            pairs = ((g[r - root], g[r]) for g in within for r in range(len(g)))
            kind, within = "permute", tuple(sorted(pairs))
        elif kind == "broadcast" and self.platform != "gpu":
            kind, operation = "all_reduce", "sum"
        elif kind == "broadcast":
            within = tuple((g[root], *g[:root], *g[root + 1 :]) for g in within)
        return [Expected(kind, operation, dtype, count, within, axes, self.op.span)]

    def _dtype(self, kind: str) -> str:
        """The HLO element type of the collective."""
        dtype, on_cpu = self.leaf.dtype, self.platform == "cpu"
        adds = kind in REDUCING
        if dtype is DType.BOOL:
            return "s32" if adds else "u8" if on_cpu else "pred"
        if dtype.is_float and self.op.op in ("max", "min"):
            widened = adds and not on_cpu and dtype.nbytes == 2  # NCCL reduces no integers of 16 bits
            return f"s{8 * (4 if widened else dtype.nbytes)}"
        if not on_cpu or not dtype.is_float:
            return _HLO[dtype]
        if adds:
            return "f32" if dtype is DType.BF16 else _HLO[dtype]
        if kind == "broadcast" or dtype.nbytes == 2:
            return f"u{8 * dtype.nbytes}"
        return _HLO[dtype]
