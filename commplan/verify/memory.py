"""Memory of one rank: how much of it a phase needs at most."""

from __future__ import annotations

from typing import NamedTuple

from commplan.diagnostics import Span
from commplan.ir.plan import Ref
from commplan.ir.schedule import Phase, Schedule, operands, results


class Memory(NamedTuple):
    """nbytes: the most that lies on one rank at one moment of a phase, inputs and states included; span: the
    plan line that runs then, None where nothing is made. buffers: the part of it that collectives work on."""

    phase: str
    nbytes: int
    buffers: int
    span: Span | None


def memory(schedule: Schedule) -> tuple[Memory, ...]:
    """A bound for each phase.

    Inputs and states that live on no server are there all the time, read or not; a value is there from the
    op that makes it to the last that reads it, or to the end where it is an output or updates a state. A
    chunk program has as much again to receive into: a round brings at most one message into each slot, which
    is proved. Where it runs while others do (`split`), operand and receive buffer stay until the result is
    read. Nothing is taken to be made in place, so that the bound holds for every backend; what a bound
    function or `native` needs inside is their own.
    """
    return tuple(_phase(schedule, phase) for phase in schedule.phases)


def _phase(schedule: Schedule, phase: Phase) -> Memory:
    size = {value.id: value.nbytes for value in (*schedule.entry, *phase.values)}
    given = {value.id for value in schedule.entry if value.placement.server is None}
    local = {value.id for value in phase.values}
    first, last = _lives(phase)
    staged = [op.staged(size) for op in phase.ops]
    end = [0] * (len(phase.ops) + 1)  # bytes that are free after each op
    for ref, index in last.items():
        if ref not in given and ref in local:
            end[index] += size[ref]
    for index, op in enumerate(phase.ops):
        end[first.get(results(op)[0], index) if op.is_split else index] += staged[index]
    now = most = sum(size[ref] for ref in given)
    span, buffers = None, 0
    for index, op in enumerate(phase.ops):
        now += sum(size[ref] for ref in results(op)) + staged[index]
        if now > most:
            most, span = now, op.span
        buffers = max(buffers, op.buffers(size))
        now -= end[index]
    return Memory(phase.name, most, buffers, span)


def _lives(phase: Phase) -> tuple[dict[Ref, int], dict[Ref, int]]:
    """The first op that reads a value, and the last that needs it."""
    first: dict[Ref, int] = {}
    last: dict[Ref, int] = {}
    for index, op in enumerate(phase.ops):
        for ref in operands(op):
            first.setdefault(ref, index)
        for ref in (*operands(op), *results(op)):
            last[ref] = index
    for index, op in enumerate(phase.ops):
        if op.is_split:
            read = first.get(results(op)[0], index)
            last[operands(op)[0]] = max(last[operands(op)[0]], read)
    for binding in (*phase.outputs, *phase.updates):
        last[binding.value] = len(phase.ops)
    return first, last
