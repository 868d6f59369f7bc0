"""The collectives that a phase of a schedule should become, and how they differ from those found.

`expected` follows the lowering to JAX: `native` is one HLO collective per array, `hierarchical` is
reduce-scatter inwards, all-reduce at the outermost level, all-gather outwards; a broadcast is an
all-reduce of what the root has and zeros. On CPUs XLA promotes sums of 16-bit floats to f32, and
the other moves of such floats travel as u16. Groups of one rank are no collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Literal, Protocol

import msgspec

from commplan.diagnostics import Span
from commplan.ir.schedule import Collective, Leaf, Phase, Schedule, Value
from commplan.ir.types import DType
from commplan.lowering.audit.step import CompiledStep, Found

_HLO = {
    DType.F32: "f32", DType.BF16: "bf16", DType.F16: "f16", DType.F64: "f64", DType.I32: "s32",
    DType.I64: "s64", DType.U8: "u8", DType.BOOL: "pred",
}  # fmt: skip
_WIDTH = {"f32": 4, "s32": 4, "f64": 8, "s64": 8, "bf16": 2, "f16": 2, "u16": 2, "u8": 1, "pred": 1}
_NARROW = (DType.BF16, DType.F16)

Groups = tuple[tuple[int, ...], ...]


class MeshLike(Protocol):
    """Anything with the sizes of its axes, in the order in which devices are counted."""

    @property
    def shape(self) -> Mapping[str, int]: ...


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


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as planned. `field` says what differs where both sides are there."""

    kind: Literal["missing", "extra", "changed", "moved", "merged"]
    text: str
    expected: tuple[Expected, ...] = ()
    found: tuple[Found, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """The outcome of a comparison: `ok` if the compiled step has the plan's collectives and no others."""

    expected: tuple[Expected, ...]
    found: tuple[Found, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            return f"{len(self.found)} collectives, as planned"
        return "\n".join(f"{difference.kind}: {difference.text}" for difference in self.differences)


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
    for op in body.ops:
        if isinstance(op, Collective) and op.lane == "network":
            found += _of_collective(op, values, body, mesh, platform)
    return tuple(item for item in found if len(item.groups[0]) > 1 and item.count)


def compare(wanted: Sequence[Expected], step: CompiledStep, *, scope: str = "") -> Report:
    """Compare what a plan asks for with what a compiled step has.

    `scope`: look only at the collectives whose `op_name` contains it (all of them by default).
    """
    found = tuple(item for item in step.collectives if scope in item.op_name)
    left, right = [_key_of(item) for item in wanted], [_key_found(item) for item in found]
    differences: list[Difference] = []
    for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            differences += _explain(tuple(wanted[i:j]), found[k:m])
    return Report(tuple(wanted), found, _with_moves(tuple(differences)))


def _of_collective(
    op: Collective, values: Mapping[str, Value], phase: Phase, mesh: MeshLike, platform: str
) -> list[Expected]:
    leaves = values[op.operand].leaves
    if op.kind == "reduce_scatter":
        leaves = _padded(leaves, math.prod(mesh.shape[axis] for axis in op.axes), op, values)
    made: list[Expected] = []
    for leaf in leaves:
        if op.kind == "all_reduce" and op.algorithm.name == "hierarchical":
            made += _hierarchical(op, leaf, mesh, platform)
            continue
        made.append(_one(op.kind, op, leaf, leaf.size, op.axes, mesh, platform))
    return made


def _padded(
    leaves: tuple[Leaf, ...], ways: int, op: Collective, values: Mapping[str, Value]
) -> tuple[Leaf, ...]:
    """Leaves as a reduce-scatter gives them: flat, padded to a multiple of `ways`. An array pads its rows."""
    if values[op.operand].kind == "array" and leaves[0].shape:
        rows, *rest = leaves[0].shape
        return (msgspec.structs.replace(leaves[0], shape=(-(-rows // ways) * ways, *rest)),)
    return tuple(msgspec.structs.replace(leaf, shape=(-(-leaf.size // ways) * ways,)) for leaf in leaves)


def _hierarchical(op: Collective, leaf: Leaf, mesh: MeshLike, platform: str) -> list[Expected]:
    levels = [str(arg.key or arg.value) for arg in op.algorithm.args]
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


def _one(
    kind: str, op: Collective, leaf: Leaf, count: int, axes: tuple[str, ...], mesh: MeshLike, platform: str
) -> Expected:
    reduction = op.op if kind in ("all_reduce", "reduce_scatter") else None
    dtype = _HLO[leaf.dtype]
    if kind == "broadcast":
        kind, reduction = "all_reduce", "sum"
    if platform == "cpu" and leaf.dtype in _NARROW:
        dtype = "f32" if kind in ("all_reduce", "reduce_scatter") else "u16"
    return Expected(kind, reduction, dtype, count, groups_of(axes, mesh), axes, op.span)


def _key_of(item: Expected) -> tuple[object, ...]:
    return (item.kind, item.op, (item.dtype,), item.count, _plain(item.kind, item.groups), 1)


def _key_found(item: Found) -> tuple[object, ...]:
    # XLA:CPU writes one all-to-all as one operand per rank; anything else with several operands was merged.
    arrays = 1 if item.kind == "all_to_all" else len(item.inputs)
    return (item.kind, item.op, item.dtypes, item.count, _plain(item.kind, item.groups), arrays)


def _plain(kind: str, groups: Groups) -> Groups:
    """Groups in a fixed order; within a group the order matters to all but an all-reduce."""
    return tuple(sorted(tuple(sorted(group)) if kind == "all_reduce" else group for group in groups))


def _explain(wanted: tuple[Expected, ...], found: tuple[Found, ...]) -> list[Difference]:
    """Differences of one stretch in which the two sequences do not agree."""
    if len(wanted) > len(found) > 0 and sum(len(item.inputs) for item in found) == len(wanted):
        text = f"{len(wanted)} collectives became {len(found)}: {'; '.join(map(str, found))}"
        return [Difference("merged", text, wanted, found)]
    if len(wanted) == len(found):
        pairs = zip(wanted, found, strict=True)
        if all(w.kind == f.kind for w, f in pairs):
            return [_changed(w, f) for w, f in zip(wanted, found, strict=True)]
    missing = [Difference("missing", f"{item}", (item,)) for item in wanted]
    return missing + [Difference("extra", f"{item} ({item.name})", (), (item,)) for item in found]


def _changed(wanted: Expected, found: Found) -> Difference:
    names = ("kind", "operation", "dtype", "elements", "groups", "arrays")
    pairs = zip(names, _key_of(wanted), _key_found(found), strict=True)
    what = ", ".join(f"{name} {_short(f)} instead of {_short(w)}" for name, w, f in pairs if w != f)
    return Difference("changed", f"{wanted}: {what}", (wanted,), (found,))


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return text if len(text) <= 60 else f"{text[:60]}..."


def _with_moves(differences: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Call a collective that is missing in one place and extra in another what it is: moved."""
    left = list(differences)
    moved: list[Difference] = []
    for lost in [d for d in differences if d.kind == "missing"]:
        for extra in [d for d in left if d.kind == "extra"]:
            if _key_of(lost.expected[0]) == _key_found(extra.found[0]):
                left.remove(lost)
                left.remove(extra)
                text = f"{lost.expected[0]} is issued in another place ({extra.found[0].name})"
                moved.append(Difference("moved", text, lost.expected, extra.found))
                break
    return (*left, *moved)
