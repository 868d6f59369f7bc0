"""A profile for XLA's latency-hiding scheduler, from estimated times, and what the scheduler does with it.

Left to itself the scheduler of XLA:GPU counts every collective alike and every matrix product alike. Profile
guided latency estimation (PGLE) gives it microseconds of each instruction, which JAX otherwise measures in
the first runs of a step. The profile is a `ProfiledInstructionsProto` in text form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from commplan.lowering.audit.estimate import Estimate, Machine, seconds_of, seconds_of_work
from commplan.lowering.audit.hlo import read_module
from commplan.lowering.audit.step import CompiledCollective, CompiledStep
from commplan.lowering.audit.walk import audit_text

EXCHANGE_WEIGHT = 2.0
"""What an exchange (all-to-all) is said to take, in times of what it takes: the scheduler, which goes from
the end of a step to its beginning, then keeps more for what runs under it. Of 1, 2 and 3 the best or within
0.01 ms of it where experts are exchanged on 8, 32 and 128 H100 (`bench.compiled`)."""


def profile(compiled: str, machine: Machine, exchange_weight: float = EXCHANGE_WEIGHT) -> bytes:
    """What each instruction of a compiled step takes on `machine`, for the compile option `fdo_profile`.

    exchange_weight: what an exchange is said to take, in times of what it takes.

    Raises `HloError` if the text is not a whole HLO module.
    """
    step = audit_text(compiled)
    times = dict.fromkeys(_conditions(compiled), 0.0) | dict(_times(step, machine))
    for collective in step.collectives:
        if collective.kind == "all_to_all":
            times[collective.name] *= exchange_weight
    lines = (f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n' for name, seconds in times.items())
    return "".join(lines).encode()


def _conditions(compiled: str) -> Iterator[str]:
    """The instructions of loops' conditions, which compare two numbers."""
    module = read_module(compiled)
    for computation in module.computations.values():
        for loop in computation.instructions:
            condition = (loop.attribute("condition") or "").lstrip("%") if loop.opcode == "while" else ""
            if condition:
                yield from (each.scheduled_name for each in module.computations[condition].instructions)


def _times(step: CompiledStep, machine: Machine) -> Iterator[tuple[str, float]]:
    """Seconds of every product, move, collective and loop by its name, bodies before their loops."""
    within = defaultdict[str, float](float)  # a computation's own work, that of its loops included
    for work in (*step.products, *step.moves):
        seconds = seconds_of_work(work, machine)
        within[work.computation] += seconds
        yield work.name, seconds
    for collective in step.collectives:
        seconds = seconds_of(collective, machine)
        if collective.start == collective.done:
            within[collective.computation] += seconds
        yield collective.name, seconds
    for loop in reversed(step.loops):  # the walk has met a loop before those in its body
        seconds = (loop.trips or 1) * within[loop.body]
        within[loop.computation] += seconds
        yield loop.name, seconds


class Shift(msgspec.Struct, frozen=True):
    """One collective without a profile and with one, each a pair of before and after.

    phase, line: of the plan, "" and 0 where it is none of the plan's. collective: in words. kind: as of
    `CompiledCollective`. started, awaited: the products of its computation that are issued before it starts,
    and before it is done. exposed: seconds, estimated.
    """

    phase: str
    line: int
    collective: str
    kind: str
    started: tuple[int, int]
    awaited: tuple[int, int]
    exposed: tuple[float, float]

    @property
    def moved(self) -> bool:
        """Whether it starts or is awaited elsewhere among the products."""
        return self.started[0] != self.started[1] or self.awaited[0] != self.awaited[1]


def shifts(before: CompiledStep, after: CompiledStep, costs: tuple[Estimate, Estimate]) -> tuple[Shift, ...]:
    """Each collective that both steps have, by its name, in the order of `before`."""
    others = {collective.name: collective for collective in after.collectives}
    exposed = [{wait.name: wait.exposed for wait in each.waits} for each in costs]
    return tuple(
        _shift(before, collective, after, others[collective.name], exposed[0].get(collective.name, 0.0),
               exposed[1].get(collective.name, 0.0))
        for collective in before.collectives
        if collective.name in others
    )  # fmt: skip


def _shift(
    before: CompiledStep,
    first: CompiledCollective,
    after: CompiledStep,
    second: CompiledCollective,
    *exposed: float,
) -> Shift:
    starts = before.before(first), after.before(second)
    hidden = len(before.hidden(first)), len(after.hidden(second))
    awaited = starts[0] + hidden[0], starts[1] + hidden[1]
    phase, line = first.scopes[0] if first.scopes else ("", 0)
    return Shift(phase, line, str(first), first.kind, starts, awaited, (exposed[0], exposed[1]))
