"""rates: how members by their own clocks go together, worked out and recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from commplan.input.prefetch import prefetch
from commplan.input.rates import buffer_text, rates, round_text
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.schedule import Map, Phase, Read, Schedule, operands, results
from commplan.passes.pipeline.base import Context, Pass


class RatesPass(Pass, frozen=True):
    """Works out the round, the buffer bound and the lag of members by their own clocks."""

    name: ClassVar[str] = "rates"

    def phases(self, schedule: Schedule, context: Context, choices: list[Choice]) -> Iterable[Phase]:
        """Only choices are recorded: units, bounds and steps follow from the batches of a load."""
        choices += [
            _choice(schedule, phase, op)
            for phase in schedule.phases
            for op in phase.ops
            if isinstance(op, Read) and op.clock is not None
        ]
        return schedule.phases


def _choice(schedule: Schedule, phase: Phase, op: Read) -> Choice:
    timing = rates(op.batch, prefetch(phase.ops))
    nbytes = sum(
        _record(phase, ref, max(op.batch) // schedule.size(op.split)) for ref in _kept(schedule, phase, op)
    )
    text = f"`{name_of(op.result)}` of {phase.name} by the clocks of `{op.clock}`: {round_text(timing)}"
    return Choice("rates", text, buffer_text(timing, nbytes), op.span)


def _kept(schedule: Schedule, phase: Phase, load: Read) -> list[Ref]:
    """Where the work ends that is the same for all members, record by record: its values that are read by
    something else or leave the phase."""
    if load.per:
        return []
    alike = {load.result}
    for op in phase.ops:
        same = isinstance(op, Map) and schedule.fn(op.fn).where == "host" and not op.random and not op.per
        if same and alike.issuperset(operands(op)):
            alike.update(results(op))
    bound = {binding.value for binding in (*phase.outputs, *phase.takes)}
    read = {ref for op in phase.ops if not alike.issuperset(results(op)) for ref in operands(op)}
    return [ref for op in phase.ops for ref in results(op) if ref in alike and ref in bound | read]


def _record(phase: Phase, ref: Ref, rows: int) -> int:
    """Bytes of one record of a value; 0 where their length varies."""
    return next(value.nbytes for value in phase.values if value.id == ref) // rows
