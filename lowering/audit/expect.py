"""The collectives that a phase of a schedule should become, and how they differ from those found.

`expected` follows the lowering to JAX: `native` is one HLO collective per array, `hierarchical` with native
levels is reduce-scatter inwards, all-reduce at the outermost level, all-gather outwards, and a chunk program
is the permutes of its rounds. A broadcast is XLA's own on GPUs and on CPUs an all-reduce of what the root
has, as integers, and zeros. XLA:CPU sums bf16 as f32, and other moves of 16-bit floats travel as u16 there.
Groups of one rank are no collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from commplan.collectives.program import Ints, Kind, Program
from commplan.collectives.scalars import scalar_algorithm
from commplan.diagnostics import Span
from commplan.ir.axes import groups
from commplan.ir.schedule import Collective, Leaf, Phase, Schedule, Spread, Value, operands, results
from commplan.ir.types import DType
from commplan.lowering.audit.hlo import Tensor
from commplan.lowering.programs import NATIVE, Level, levels, members, program_at, program_of, spreads
from commplan.lowering.steps import steps, stretches

_HLO = {
    DType.F32: "f32", DType.BF16: "bf16", DType.F16: "f16", DType.F64: "f64", DType.I32: "s32",
    DType.I64: "s64", DType.U8: "u8", DType.BOOL: "pred",
}  # fmt: skip

Groups = tuple[tuple[int, ...], ...]


class MeshLike(Protocol):
    """Anything with the sizes of its axes, in the order in which devices are counted."""

    @property
    def shape(self) -> Mapping[Any, int]: ...


class Expected(msgspec.Struct, frozen=True):
    """One collective that the plan asks for, as HLO has it: each rank gives `count` elements of `dtype`."""

    kind: str
    op: str | None
    dtype: str
    count: int
    groups: Groups
    axes: tuple[str, ...]
    span: Span

    @property
    def nbytes(self) -> int:
        """Bytes that one rank gives."""
        return Tensor(self.dtype, (self.count,)).nbytes

    def __str__(self) -> str:
        what = f"{self.kind}({self.op})" if self.op else self.kind
        return f"{what} {self.dtype}[{self.count}] over {', '.join(self.axes)} (line {self.span.line})"


def groups_of(axes: Sequence[str], mesh: MeshLike) -> Groups:
    """The ranks of each communicator over `axes`, row-major over `axes`, first named major.

    Ranks are numbered as the mesh counts its devices, row-major over its axes in order.
    """
    return tuple(groups(axes, mesh.shape))


def expected(
    schedule: Schedule, phase: str, mesh: MeshLike, platform: Literal["cpu", "gpu"] = "cpu"
) -> tuple[Expected, ...]:
    """The collectives of `phase`, in the order of issue, over `mesh` (which may have further axes)."""
    body = schedule.phase(phase)
    values = {value.id: value for value in (*schedule.entry, *body.values)}
    found: list[Expected] = []
    live = _live(body)
    for op in body.ops:
        if isinstance(op, Collective) and op.result in live:
            found += _of_collective(op, values, Place(mesh, spreads(schedule), platform))
    return tuple(item for item in found if len(item.groups[0]) > 1 and item.count)


def _live(phase: Phase) -> frozenset[str]:
    """The values that outputs and updates need and that are not source-only: what a call computes."""
    taken = {binding.value for binding in phase.takes}
    live = {binding.value for binding in phase.outputs if not binding.source_only}
    live |= {binding.value for binding in phase.updates}
    live -= taken
    for op in reversed(phase.ops):
        if not live.isdisjoint(results(op)):
            live |= set(operands(op)) - taken
    return frozenset(live)


class Place(NamedTuple):
    """Where collectives run: the mesh, the topology's levels that its axes span, and what kind of device."""

    mesh: MeshLike
    spread: Mapping[str, tuple[Spread, ...]]
    platform: str


def _of_collective(op: Collective, values: Mapping[str, Value], place: Place) -> list[Expected]:
    value = values[op.operand]
    made: list[Expected] = []
    for leaf in value.leaves:
        if not leaf.shape and op.kind == "all_gather":
            continue  # a scalar leaf of a split tree was never cut
        if not leaf.shape and op.kind == "reduce_scatter":
            whole = msgspec.structs.replace(op, kind="all_reduce", algorithm=scalar_algorithm(op.algorithm))
            made += _of_leaf(whole, leaf, leaf.size, place)
            continue
        count = leaf.size
        if op.kind == "reduce_scatter":
            count = _padded(leaf, value.kind == "array", math.prod(place.mesh.shape[a] for a in op.axes))
        made += _of_leaf(op, leaf, count, place)
    return made


def _padded(leaf: Leaf, array: bool, ways: int) -> int:
    """Elements that a leaf gives to a reduce-scatter: flat and padded, or, of an array, its rows padded."""
    rows, width = (leaf.shape[0], math.prod(leaf.shape[1:])) if array else (leaf.size, 1)
    return -(-rows // ways) * ways * width


def _of_leaf(op: Collective, leaf: Leaf, count: int, place: Place) -> list[Expected]:
    """What one array of `count` elements on each rank becomes."""
    if not count:
        return []
    mesh, ways = place.mesh, math.prod(place.mesh.shape[axis] for axis in op.axes)
    whole = count * ways if op.kind == "all_gather" else count
    program = program_of(op, mesh.shape, place.spread, whole * leaf.dtype.nbytes)
    everyone = np.arange(ways, dtype=np.int64)[None]
    if program is not None:
        return _permutes(program, op, leaf, whole, everyone, place)
    own = levels(op, mesh.shape, place.spread)
    plain = all(level.algorithm == NATIVE and level.axis for level in own)
    flat = len(own) < 2 or (op.kind == "all_reduce" and (leaf.dtype is DType.BOOL or not leaf.shape))
    if flat or (plain and op.op in ("max", "min")):
        return _native(op.kind, op, leaf, count, op.axes, everyone, op.root or 0, place)
    return _by_level(op, leaf, count, own, place)


def _by_level(op: Collective, leaf: Leaf, count: int, own: tuple[Level, ...], place: Place) -> list[Expected]:
    """See `lowering.jax.levels`."""
    made: list[Expected] = []
    match op.kind:
        case "broadcast":
            for level in reversed(own):
                root = (op.root or 0) // level.stride % level.ranks
                made += _at("broadcast", op, leaf, count, level, root, place)
        case "reduce_scatter":
            for level in own:
                made += _at("reduce_scatter", op, leaf, count, level, 0, place)
                count //= level.ranks
        case "all_gather":
            for level in reversed(own):
                made += _at("all_gather", op, leaf, count, level, 0, place)
                count *= level.ranks
        case _ if op.op == "sum":
            *inner, outer = own
            ways = math.prod(level.ranks for level in inner)
            count = -(-count // ways) * ways
            for level in inner:
                made += _at("reduce_scatter", op, leaf, count, level, 0, place)
                count //= level.ranks
            made += _at("all_reduce", op, leaf, count, outer, 0, place)
            for level in reversed(inner):
                made += _at("all_gather", op, leaf, count, level, 0, place)
                count *= level.ranks
        case _:
            for level in own:
                made += _at("all_reduce", op, leaf, count, level, 0, place)
    return made


def _at(
    kind: Kind, op: Collective, leaf: Leaf, count: int, level: Level, root: int, place: Place
) -> list[Expected]:
    """One level's part, where each rank gives `count` elements."""
    ways = math.prod(place.mesh.shape[axis] for axis in op.axes)
    groups = members(level, ways)
    if level.algorithm != NATIVE:
        whole = count * level.ranks if kind == "all_gather" else count
        program = program_at(level, kind, op, whole * leaf.dtype.nbytes, root)
        return _permutes(program, op, leaf, whole, groups, place)
    if level.axis is not None:
        everyone = np.arange(level.ranks, dtype=np.int64)[None]
        return _native(kind, op, leaf, count, (level.axis,), everyone, root, place)
    if kind == "all_reduce" and op.op in ("max", "min"):
        return _native("all_gather", op, leaf, count, op.axes, groups, 0, place)
    if kind in ("all_reduce", "broadcast"):  # made of the two that `lax` has for groups
        padded = -(-count // level.ranks) * level.ranks
        down = _native("reduce_scatter", op, leaf, padded, op.axes, groups, 0, place)
        up = _native("all_gather", op, leaf, padded // level.ranks, op.axes, groups, 0, place)
        if kind == "all_reduce":
            return [*down, *up]
        bits = f"u{8 * leaf.dtype.nbytes}" if leaf.dtype.is_float else down[0].dtype
        return [msgspec.structs.replace(each, op=each.op and "sum", dtype=bits) for each in (*down, *up)]
    return _native(kind, op, leaf, count, op.axes, groups, 0, place)


def _permutes(
    program: Program, op: Collective, leaf: Leaf, whole: int, groups: Ints, place: Place
) -> list[Expected]:
    """The permutes of a program on `whole` elements within each of `groups`; a loop has them once."""
    dtype = _dtype("permute", leaf.dtype, place.platform)
    if leaf.dtype is DType.BOOL:
        dtype = "u8"  # in which they are combined
    members_ = [np.array(ranks)[groups] for ranks in groups_of(op.axes, place.mesh)]
    made: list[Expected] = []
    for stretch in stretches(steps(program, whole)):
        for move in stretch[0].moves:
            pairs = tuple(
                (int(group[src]), int(group[dst]))
                for within in members_
                for group in within
                for src, dst in move.pairs
            )
            count = sum(part.length for part in move.parts)
            made.append(Expected("permute", None, dtype, count, pairs, op.axes, op.span))
    return made


def _native(
    kind: str,
    op: Collective,
    leaf: Leaf,
    count: int,
    axes: tuple[str, ...],
    groups: Ints,
    root: int,
    place: Place,
) -> list[Expected]:
    """XLA's own collective within each of `groups` of the ranks over `axes`."""
    adds = kind in ("all_reduce", "reduce_scatter")
    found = groups_of(axes, place.mesh)
    within = tuple(tuple(int(r) for r in np.array(ranks)[group]) for ranks in found for group in groups)
    dtype = _dtype(kind, leaf.dtype, place.platform)
    if kind != "broadcast":
        return [Expected(kind, op.op if adds else None, dtype, count, within, axes, op.span)]
    if place.platform != "gpu":
        return [Expected("all_reduce", "sum", dtype, count, within, axes, op.span)]
    first = tuple((g[root], *g[:root], *g[root + 1 :]) for g in within)
    return [Expected(kind, None, dtype, count, first, axes, op.span)]


def _dtype(kind: str, dtype: DType, platform: str) -> str:
    """HLO's element type of what moves."""
    adds = kind in ("all_reduce", "reduce_scatter")
    if dtype is DType.BOOL:
        return "s32" if adds else "u8" if platform == "cpu" else "pred"
    if platform != "cpu" or not dtype.is_float:
        return _HLO[dtype]
    if adds:
        return "f32" if dtype is DType.BF16 else _HLO[dtype]
    if kind == "broadcast" or dtype.nbytes == 2:
        return f"u{8 * dtype.nbytes}"
    return _HLO[dtype]
