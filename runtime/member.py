"""`run.member(m)`: one member of an ensemble, with its part of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import AxisKind
from commplan.ir.types import Placement
from commplan.lowering.jax.layout import spec
from commplan.lowering.jax.trees import leaves_of
from commplan.lowering.jax.untyped import jax


def ensemble(schedule: ir.Schedule, place: int) -> str:
    """The plan's one ensemble. Raises CP0818 where there is none, there are several, or no such member."""
    names = [axis for axis in schedule.axes if axis.kind is AxisKind.ENSEMBLE]
    if len(names) != 1:
        found = ", ".join(f"`{axis.name}`" for axis in names)
        fail(
            "CP0818",
            f"run.member needs a plan with one ensemble, and this one has {found or 'none'}",
            file=schedule.file,
        )
    if not 0 <= place < names[0].size:
        fail(
            "CP0818",
            f"ensemble `{names[0].name}` has no member {place}",
            f"its members are 0 to {names[0].size - 1}",
            file=schedule.file,
        )
    return names[0].name


def sub_mesh(mesh: Any, axis: str, place: int) -> Mesh:
    """The devices of one member; a mesh without `axis`."""
    at = mesh.axis_names.index(axis)
    devices = np.take(mesh.devices, place, axis=at)
    names = tuple(name for name in mesh.axis_names if name != axis)
    types = tuple(kind for i, kind in enumerate(mesh.axis_types) if i != at)
    return Mesh(devices, names, axis_types=types)


def without(schedule: ir.Schedule, axis: str) -> ir.Schedule:
    """The schedule as one member sees it: no value differs along `axis`, and nothing crosses it.

    Phases with a collective over `axis` are left out: they belong to all members.
    """

    def value(one: ir.Value) -> ir.Value:
        return msgspec.structs.replace(one, placement=_without(one.placement, axis))

    def inside(phase: ir.Phase) -> bool:
        return not any(isinstance(op, ir.Collective) and axis in op.axes for op in phase.ops)

    phases = tuple(
        msgspec.structs.replace(phase, values=tuple(value(one) for one in phase.values))
        for phase in schedule.phases
        if inside(phase)
    )
    return msgspec.structs.replace(
        schedule,
        axes=tuple(one for one in schedule.axes if one.name != axis),
        entry=tuple(value(one) for one in schedule.entry),
        phases=phases,
    )


def _without(placement: Placement, axis: str) -> Placement:
    return msgspec.structs.replace(
        placement,
        per=tuple(one for one in placement.per if one != axis),
        partial=tuple(one for one in placement.partial if one != axis),
    )


def part(name: str, tree: Any, placement: Placement, axis: str, mesh: Mesh, whole: Any) -> Any:
    """One member's part of global arrays, on its own mesh, without the dimension of `axis`.

    The part stays where it is: nothing moves between devices. Raises CP0805 for arrays that lie otherwise
    on the mesh `whole`.
    """
    at = placement.per.index(axis) if axis in placement.per else None
    own = set(mesh.devices.flat)
    expected = NamedSharding(whole, spec(placement))
    for path, x in zip(*leaves_of(tree), strict=True):
        if getattr(x, "sharding", None) is None or not x.sharding.is_equivalent_to(expected, x.ndim):
            fail(
                "CP0805",
                f"`{name}`{f' at `{path}`' if path else ''} does not lie as the plan says",
                f"it is placed `{placement}`: expected a jax.Array with spec {expected.spec} on the mesh of"
                " the run",
            )
    sharding = NamedSharding(mesh, spec(_without(placement, axis)))

    def take(x: Any) -> Any:
        pieces = [shard.data for shard in x.addressable_shards if shard.device in own]
        shape = x.shape
        if at is not None:
            pieces = [piece.reshape(piece.shape[:at] + piece.shape[at + 1 :]) for piece in pieces]
            shape = x.shape[:at] + x.shape[at + 1 :]
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=x.dtype)

    return jax.tree_util.tree_map(take, tree)


def join(parts: Mapping[int, Any], placement: Placement, axis: str, mesh: Any) -> Any:
    """The way back: global arrays from the parts of the members whose devices this process holds."""
    at = placement.per.index(axis)
    count = int(mesh.shape[axis])
    sharding = NamedSharding(mesh, spec(placement))

    def put(*members: Any) -> Any:
        first = members[0]
        shape = (*first.shape[:at], count, *first.shape[at:])
        pieces = [
            shard.data.reshape((*shard.data.shape[:at], 1, *shard.data.shape[at:]))
            for x in members
            for shard in x.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=first.dtype)

    return jax.tree_util.tree_map(put, *parts.values())
