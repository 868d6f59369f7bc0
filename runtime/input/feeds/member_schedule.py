"""The schedule of a member whose batches consist of one or more units."""

from __future__ import annotations

import msgspec

from commplan.diagnostics import fail
from commplan.input.rates import rates
from commplan.ir.schedule import Op, Read, Schedule
from commplan.runtime.input.multirate.schedule import OWN, ClockPlan, batches


def units_of(plan: ClockPlan, member: int, batch: int | None, unit: int) -> int:
    """The number of units in a batch of a member.

    Args:
        plan: the schedules of the members.
        member: the number of the member.
        batch: the number of records in a batch; None for the batch size of the plan.
        unit: the number of records in a unit.

    Raises:
        CommplanError: CP0931 if the batch is not a multiple of the unit.
    """
    records = plan.rates.batches[member] if batch is None else batch
    if not hasattr(records, "__index__") or records < 1 or records % unit:
        fail(
            "CP0931",
            f"a batch of {records!r} records is no multiple of the feed's unit of {unit}",
            f"such as batch={2 * unit}; a smaller batch in the plan makes a smaller unit",
            file=plan.schedule.file,
        )
    return records // unit


def of_member(plan: ClockPlan, member: int, each: int) -> Schedule:
    """Return the schedule of a member whose batches consist of `each` units."""
    schedule = plan.member(member)
    reads = {op.result: op for op in plan.schedule.phase(plan.phase).ops if isinstance(op, Read)}

    def rebatched(op: Op) -> Op:
        if not isinstance(op, Read):
            return op
        read = reads.get(op.result) or reads[op.result.removesuffix(OWN)]
        unit = rates(batches(read, plan.clock, plan.schedule)).unit
        return msgspec.structs.replace(op, batch=(unit * each,))

    phases = tuple(
        msgspec.structs.replace(p, ops=tuple(rebatched(op) for op in p.ops)) if p.name == plan.phase else p
        for p in schedule.phases
    )
    return msgspec.structs.replace(schedule, phases=phases)
