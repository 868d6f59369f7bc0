"""A profile of estimated times for XLA's latency-hiding scheduler, and its effect.

Without a profile, the scheduler of XLA:GPU uses equal costs for all collectives and for all matrix products.
Profile guided latency estimation (PGLE) provides microseconds for each instruction, which JAX otherwise
measures in the first runs of a step. The profile is a `ProfiledInstructionsProto` in text form.
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
"""Factor applied to the estimated time of an all-to-all. The scheduler works from the end of a step to its
beginning, and reserves more computation for overlap if the factor is larger. Among 1, 2 and 3, this factor
was the best or within 0.01 ms of it for expert exchange on 8, 32 and 128 H100 (`bench.compiled`)."""


def profile(compiled: str, machine: Machine, exchange_weight: float = EXCHANGE_WEIGHT) -> bytes:
    """Estimate the time of each instruction of a compiled step, for the compile option `fdo_profile`.

    Args:
        compiled: the compiled text.
        machine: the rates.
        exchange_weight: factor for the time of all-to-alls.

    Raises:
        HloError: the text is not a whole HLO module.
    """
    step = audit_text(compiled)
    times = dict.fromkeys(_conditions(compiled), 0.0) | dict(_times(step, machine))
    for collective in step.collectives:
        if collective.kind == "all_to_all":
            times[collective.name] *= exchange_weight
    lines = (f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n' for name, seconds in times.items())
    return "".join(lines).encode()


def _conditions(compiled: str) -> Iterator[str]:
    """The instructions of loop conditions, whose time is negligible."""
    module = read_module(compiled)
    for computation in module.computations.values():
        for loop in computation.instructions:
            condition = (loop.attribute("condition") or "").lstrip("%") if loop.opcode == "while" else ""
            if condition:
                yield from (
                    instruction.scheduled_name for instruction in module.computations[condition].instructions
                )


def _times(step: CompiledStep, machine: Machine) -> Iterator[tuple[str, float]]:
    """Seconds of every product, move, collective and loop by name; loop bodies come first."""
    within = defaultdict[str, float](float)  # seconds of each computation, including its loops
    for work in (*step.products, *step.moves):
        seconds = seconds_of_work(work, machine)
        within[work.computation] += seconds
        yield work.name, seconds
    for collective in step.collectives:
        seconds = seconds_of(collective, machine)
        if collective.start == collective.done:
            within[collective.computation] += seconds
        yield collective.name, seconds
    for loop in reversed(step.loops):  # outer loops precede inner loops in `step.loops`
        seconds = (loop.trips or 1) * within[loop.body]
        within[loop.computation] += seconds
        yield loop.name, seconds


class CollectiveShift(msgspec.Struct, frozen=True):
    """A collective without and with a profile; pairs are (before, after).

    Attributes:
        phase: phase of the plan, empty if not part of the plan.
        line: plan line, 0 if not part of the plan.
        collective: description.
        kind: see `CompiledCollective`.
        started: number of products issued before its start.
        awaited: number of products issued before its done.
        exposed: estimated exposed seconds.
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
        """Whether its start or done moved relative to products."""
        return self.started[0] != self.started[1] or self.awaited[0] != self.awaited[1]


def shifts(
    before: CompiledStep, after: CompiledStep, costs: tuple[Estimate, Estimate]
) -> tuple[CollectiveShift, ...]:
    """Compare each collective that both steps have, by name, in the order of `before`."""
    by_name = {collective.name: collective for collective in after.collectives}
    exposed = [{wait.name: wait.exposed for wait in estimate.waits} for estimate in costs]
    return tuple(
        _shift(before, collective, after, by_name[collective.name], exposed[0].get(collective.name, 0.0),
               exposed[1].get(collective.name, 0.0))
        for collective in before.collectives
        if collective.name in by_name
    )  # fmt: skip


def _shift(
    before: CompiledStep,
    first: CompiledCollective,
    after: CompiledStep,
    second: CompiledCollective,
    *exposed: float,
) -> CollectiveShift:
    starts = before.before(first), after.before(second)
    hidden = len(before.hidden(first)), len(after.hidden(second))
    awaited = starts[0] + hidden[0], starts[1] + hidden[1]
    phase, line = first.scopes[0] if first.scopes else ("", 0)
    return CollectiveShift(phase, line, str(first), first.kind, starts, awaited, (exposed[0], exposed[1]))
