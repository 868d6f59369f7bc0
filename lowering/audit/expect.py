"""The collectives that a phase of a schedule should become, and how they differ from those found.

`expected` follows the lowering to JAX: `native` is one HLO collective per array, `hierarchical` is
reduce-scatter inwards, all-reduce at the outermost level, all-gather outwards. A broadcast is XLA's
own on GPUs and on CPUs an all-reduce of what the root has, as integers, and zeros. XLA:CPU sums bf16
as f32, and other moves of 16-bit floats travel as u16 there. Groups of one rank are no collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from commplan.diagnostics import Span
from commplan.ir.schedule import Collective, Leaf, Phase, Schedule, Value, operands, results
from commplan.ir.types import DType

_HLO = {
    DType.F32: "f32", DType.BF16: "bf16", DType.F16: "f16", DType.F64: "f64", DType.I32: "s32",
    DType.I64: "s64", DType.U8: "u8", DType.BOOL: "pred",
}  # fmt: skip
_WIDTH = {
    "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "u16": 2,
    "u8": 1, "pred": 1,
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
        return self.count * _WIDTH[self.dtype]

    def __str__(self) -> str:
        what = f"{self.kind}({self.op})" if self.op else self.kind
        return f"{what} {self.dtype}[{self.count}] over {', '.join(self.axes)} (line {self.span.line})"


def groups_of(axes: Sequence[str], mesh: MeshLike) -> Groups:
    """The ranks of each communicator over `axes`, row-major over `axes`, first named major.

    Ranks are numbered as the mesh counts its devices, row-major over its axes in order.
    """
    names, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
    strides = {name: math.prod(sizes[i + 1 :]) for i, name in enumerate(names)}
    rest = [name for name in names if name not in axes]

    def offsets(over: Sequence[str]) -> list[int]:
        points = itertools.product(*(range(mesh.shape[name]) for name in over))
        return [sum(i * strides[name] for i, name in zip(point, over, strict=True)) for point in points]

    return tuple(tuple(base + offset for offset in offsets(axes)) for base in offsets(rest))


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
            found += _of_collective(op, values, mesh, platform)
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


def _of_collective(
    op: Collective, values: Mapping[str, Value], mesh: MeshLike, platform: str
) -> list[Expected]:
    value = values[op.operand]
    made: list[Expected] = []
    for leaf in value.leaves:
        scalar = not leaf.shape
        if scalar and op.kind == "all_gather":
            continue  # a scalar leaf of a split tree was never cut
        levels: tuple[str, ...] = ()
        if not scalar and op.op in (None, "sum"):
            levels = tuple(axis for axis, _ in op.algorithm.levels)
        if op.kind == "broadcast":
            made += _broadcast(op, leaf, levels, mesh, platform)
        elif op.kind == "all_reduce" and len(levels) > 1:
            made += _hierarchical(op, leaf, levels, mesh, platform)
        elif op.kind == "reduce_scatter" and not scalar:
            count = _padded(leaf, value.kind == "array", math.prod(mesh.shape[axis] for axis in op.axes))
            made.append(_one(op.kind, op, leaf, count, op.axes, mesh, platform))
        else:
            kind = "all_reduce" if op.kind == "reduce_scatter" else op.kind
            made.append(_one(kind, op, leaf, leaf.size, op.axes, mesh, platform))
    return made


def _padded(leaf: Leaf, array: bool, ways: int) -> int:
    """Elements that a leaf gives to a reduce-scatter: flat and padded, or, of an array, its rows padded."""
    rows, width = (leaf.shape[0], math.prod(leaf.shape[1:])) if array else (leaf.size, 1)
    return -(-rows // ways) * ways * width


def _hierarchical(
    op: Collective, leaf: Leaf, levels: tuple[str, ...], mesh: MeshLike, platform: str
) -> list[Expected]:
    inner, outer = levels[:-1], levels[-1]
    ways = math.prod(mesh.shape[axis] for axis in inner)
    count = -(-leaf.size // ways) * ways
    down: list[Expected] = []
    up: list[Expected] = []
    for axis in inner:
        down.append(_one("reduce_scatter", op, leaf, count, (axis,), mesh, platform))
        count //= mesh.shape[axis]
        up.insert(0, _one("all_gather", op, leaf, count, (axis,), mesh, platform))
    return [*down, _one("all_reduce", op, leaf, count, (outer,), mesh, platform), *up]


def _broadcast(
    op: Collective, leaf: Leaf, levels: tuple[str, ...], mesh: MeshLike, platform: str
) -> list[Expected]:
    root, place = op.root or 0, dict[str, int]()
    for axis in reversed(op.axes):
        root, place[axis] = divmod(root, mesh.shape[axis])
    stages = [(axis,) for axis in reversed(levels)] if len(levels) > 1 else [op.axes]
    made: list[Expected] = []
    for axes in stages:
        one = _one("broadcast", op, leaf, leaf.size, axes, mesh, platform)
        if platform == "gpu":
            first = sum(
                place[a] * math.prod(mesh.shape[b] for b in axes[i + 1 :]) for i, a in enumerate(axes)
            )
            groups = tuple((g[first], *g[:first], *g[first + 1 :]) for g in one.groups)
            made.append(msgspec.structs.replace(one, groups=groups))
        else:
            made.append(msgspec.structs.replace(one, kind="all_reduce", op="sum"))
    return made


def _one(
    kind: str, op: Collective, leaf: Leaf, count: int, axes: tuple[str, ...], mesh: MeshLike, platform: str
) -> Expected:
    reduction = op.op if kind in ("all_reduce", "reduce_scatter") else None
    dtype = _dtype(kind, leaf.dtype, platform)
    return Expected(kind, reduction, dtype, count, groups_of(axes, mesh), axes, op.span)


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
