"""An upper bound for the memory of one rank, which `commplan verify` prints and reports show."""

from __future__ import annotations

from typing import NamedTuple

from commplan.diagnostics import Span
from commplan.ir.plan import Ref
from commplan.ir.schedule import Phase, Schedule, operands, results


class PeakMemory(NamedTuple):
    """Peak memory of a phase on one rank.

    Attributes:
        phase: name of the phase.
        nbytes: largest number of live bytes, including inputs and states.
        buffers: largest number of bytes that a collective works on; 0 without collectives.
        span: the plan line at the peak, or None if no op needs more than the inputs and states.
    """

    phase: str
    nbytes: int
    buffers: int
    span: Span | None


def memory(schedule: Schedule) -> tuple[PeakMemory, ...]:
    """Bound the memory of each phase.

    Liveness assumptions:

    - Inputs and states that are not on a server are live throughout the phase, even if unread.
    - A value is live from its op to its last reader, or to the end of the phase if it is an output or an
      update.
    - A chunk program needs a receive buffer as large as its operand: a round delivers at most one message
      into each slot, which is proved. If it overlaps other ops (`split`), both buffers live until the result
      is read.
    - Nothing is updated in place, so the bound holds for every backend.

    Temporaries of user functions and native collectives are not included.
    """
    return tuple(_phase(schedule, phase) for phase in schedule.phases)


def _phase(schedule: Schedule, phase: Phase) -> PeakMemory:
    """The peak memory of a rank in a phase."""
    size = {value.id: value.nbytes for value in (*schedule.entry, *phase.values)}
    resident = {value.id for value in schedule.entry if value.placement.server is None}
    local = {value.id for value in phase.values}
    first, last = _lives(phase)
    staged = [op.staged(size) for op in phase.ops]  # bytes of receive buffers
    end = [0] * (len(phase.ops) + 1)  # bytes that are freed after each op; the last are those of outputs
    for ref, index in last.items():
        if ref not in resident and ref in local:
            end[index] += size[ref]
    for index, op in enumerate(phase.ops):
        # The receive buffer of a split op is needed until its result is read.
        end[first.get(results(op)[0], index) if op.is_split else index] += staged[index]
    live = peak = sum(size[ref] for ref in resident)
    span, buffers = None, 0
    for index, op in enumerate(phase.ops):
        live += sum(size[ref] for ref in results(op)) + staged[index]
        if live > peak:
            peak, span = live, op.span
        buffers = max(buffers, op.buffers(size))
        live -= end[index]
    return PeakMemory(phase.name, peak, buffers, span)


def _lives(phase: Phase) -> tuple[dict[Ref, int], dict[Ref, int]]:
    """The index of the first op that reads each value, and of the last op that needs it.

    Values that no op reads have no first op. For outputs and updates, the last index is the number of ops.
    The operand of a split op is needed until the first op that reads its result.
    """
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
