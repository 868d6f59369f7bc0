"""The schedule of one member of an ensemble."""

from __future__ import annotations

from msgspec.structs import replace

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import AxisKind


def ensemble(schedule: ir.Schedule, place: int) -> str:
    """The plan's only ensemble; raises CP0818 if there is none, several, or no member `place`."""
    names = [axis for axis in schedule.axes if axis.kind is AxisKind.ENSEMBLE]
    if len(names) != 1:
        ensembles = ", ".join(f"`{axis.name}`" for axis in names)
        fail(
            "CP0818",
            f"run.member needs a plan with one ensemble, but this plan has {ensembles or 'none'}",
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


def without(schedule: ir.Schedule, axis: str) -> ir.Schedule:
    """The schedule of one member: no value differs along `axis`, and no collective crosses it.

    Phases with a collective over `axis` are omitted because they belong to all members.
    """

    def value(entry: ir.Value) -> ir.Value:
        where = entry.placement
        per, partial = (tuple(name for name in names if name != axis) for names in (where.per, where.partial))
        return replace(entry, placement=replace(where, per=per, partial=partial))

    phases = tuple(
        replace(phase, values=tuple(value(entry) for entry in phase.values))
        for phase in schedule.phases
        if not any(isinstance(op, ir.Collective) and axis in op.axes for op in phase.ops)
    )
    return replace(
        schedule,
        axes=tuple(entry for entry in schedule.axes if entry.name != axis),
        entry=tuple(value(entry) for entry in schedule.entry),
        phases=phases,
    )
