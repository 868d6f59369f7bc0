"""The schedule of one member of an ensemble."""

from __future__ import annotations

from msgspec.structs import replace

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import AxisKind


def ensemble(schedule: ir.Schedule, place: int) -> str:
    """The axis of the plan's only ensemble; raises CP0818 if there is none, several, or no member `place`."""
    ensembles = [axis for axis in schedule.axes if axis.kind is AxisKind.ENSEMBLE]
    if len(ensembles) != 1:
        names = ", ".join(f"`{axis.name}`" for axis in ensembles)
        fail(
            "CP0818",
            f"run.member needs a plan with one ensemble, but this plan has {names or 'none'}",
            file=schedule.file,
        )
    if not 0 <= place < ensembles[0].size:
        fail(
            "CP0818",
            f"ensemble `{ensembles[0].name}` has no member {place}",
            f"its members are 0 to {ensembles[0].size - 1}",
            file=schedule.file,
        )
    return ensembles[0].name


def without(schedule: ir.Schedule, axis: str) -> ir.Schedule:
    """The schedule of one member: it lacks `axis`, and no value is `per` or `partial` over it.

    Phases with a collective over `axis` are omitted because they belong to all members.
    """

    def member_value(value: ir.Value) -> ir.Value:
        placement = value.placement
        per = tuple(name for name in placement.per if name != axis)
        partial = tuple(name for name in placement.partial if name != axis)
        return replace(value, placement=replace(placement, per=per, partial=partial))

    phases = tuple(
        replace(phase, values=tuple(map(member_value, phase.values)))
        for phase in schedule.phases
        if not any(isinstance(op, ir.Collective) and axis in op.axes for op in phase.ops)
    )
    return replace(
        schedule,
        axes=tuple(other for other in schedule.axes if other.name != axis),
        entry=tuple(map(member_value, schedule.entry)),
        phases=phases,
    )
