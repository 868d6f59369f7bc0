"""Memory of one rank: how much of it a phase needs at most."""

from __future__ import annotations

from typing import NamedTuple

from commplan.diagnostics import Span
from commplan.ir.plan import Ref
from commplan.ir.schedule import Collective, Phase, Schedule, operands, results


class Memory(NamedTuple):
    """nbytes: what values of the plan take on one rank at the worst moment of a phase; span: the plan line that
    runs then. buffers: the most that lies in collectives at once, operands and results."""

    phase: str
    nbytes: int
    buffers: int
    span: Span | None


def memory(schedule: Schedule) -> tuple[Memory, ...]:
    """A bound for each phase.

    Inputs and states are there all the time, whether the phase reads them or not; a value is there from the op
    that makes it to the last that reads it, or to the end where it is an output or updates a state. Nothing is
    taken to be made in place, so that the bound holds for every backend; what a `map` needs inside is its own.
    """
    return tuple(_phase(schedule, phase) for phase in schedule.phases)


def _phase(schedule: Schedule, phase: Phase) -> Memory:
    size = {value.id: value.nbytes for value in (*schedule.entry, *phase.values)}
    given = {value.id for value in schedule.entry}
    last: dict[Ref, int] = {}
    for index, op in enumerate(phase.ops):
        for ref in (*operands(op), *results(op)):
            last[ref] = index
    for binding in (*phase.outputs, *phase.updates):
        last[binding.value] = len(phase.ops)
    dies: dict[int, list[Ref]] = {}
    for ref, index in last.items():
        if ref not in given:
            dies.setdefault(index, []).append(ref)
    now = most = sum(size[ref] for ref in given)
    span, buffers = None, 0
    for index, op in enumerate(phase.ops):
        now += sum(size[ref] for ref in results(op))
        if now > most:
            most, span = now, op.span
        if isinstance(op, Collective):
            buffers = max(buffers, size[op.operand] + size[op.result])
        now -= sum(size[ref] for ref in dies.get(index, ()))
    return Memory(phase.name, most, buffers, span)
