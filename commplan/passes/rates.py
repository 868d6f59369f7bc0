"""rates: derives how members that advance independently share input, and records it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from commplan.input.prefetch import prefetch
from commplan.input.rates import buffer_text, rates, round_text
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.schedule import Map, Phase, Read, Schedule, operands, results
from commplan.passes.base import Pass, PassContext


class RatesPass(Pass, frozen=True):
    """Works out the round, the buffer bound and the lag of members with independent clocks."""

    name: ClassVar[str] = "rates"

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        """Record choices only, since units, bounds and steps follow from the batch sizes of a load."""
        choices += [
            _choice(schedule, phase, op)
            for phase in schedule.phases
            for op in phase.ops
            if isinstance(op, Read) and op.clock is not None
        ]
        return schedule.phases


def _choice(schedule: Schedule, phase: Phase, op: Read) -> Choice:
    """The record of the rates and the buffer of one load with independent clocks."""
    timing = rates(op.batch, prefetch(phase.ops))
    rows, shared = max(op.batch) // schedule.size(op.split), _shared_results(schedule, phase, op)
    nbytes = sum(value.nbytes // rows for value in phase.values if value.id in shared)  # of one record
    text = f"`{name_of(op.result)}` of {phase.name} by the clocks of `{op.clock}`: {round_text(timing)}"
    return Choice("rates", text, buffer_text(timing, nbytes), op.span)


def _shared_results(schedule: Schedule, phase: Phase, load: Read) -> list[Ref]:
    """The last values of the work that is common to all members: other ops read them, or they are bound.

    Empty for a load that reads different records for each member.
    """
    if load.per:
        return []
    common = {load.result}
    for op in phase.ops:
        is_common = (
            isinstance(op, Map) and schedule.fn(op.fn).where == "host" and not op.random and not op.per
        )
        if is_common and common.issuperset(operands(op)):
            common.update(results(op))
    bound = {binding.value for binding in (*phase.outputs, *phase.takes)}
    read = {ref for op in phase.ops if not common.issuperset(results(op)) for ref in operands(op)}
    return [ref for op in phase.ops for ref in results(op) if ref in common and ref in bound | read]
