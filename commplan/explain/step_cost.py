"""The cost of a training step with its plan, and the line to change first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from commplan.cost import Prediction
from commplan.cost.schedule.prediction import PhaseTime
from commplan.diagnostics import listed
from commplan.explain.stages import stage_text
from commplan.explain.times import compared
from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.ir.remark import Alternative, Choice
from commplan.ir.types import DType, sized, timed
from commplan.verify.memory import memory

NEAR_BOUND = 1.1  # a multiple of the lower bound; below, no other algorithm is more than a tenth faster


class LineCost(msgspec.Struct, frozen=True):
    """The line with the most exposed time.

    Attributes:
        line: The line in the plan.
        stage: Its stage as text.
        exposed: Its exposed time in seconds.
        advice: Facts to consider before a change, one sentence each; may be empty. See `_advice`.
    """

    line: int
    stage: str
    exposed: float
    advice: tuple[str, ...]


class StepCost(msgspec.Struct, frozen=True):
    """One run of a phase `each step` next to the computation, in seconds.

    Attributes:
        phase: The name of the phase.
        computation: Seconds of the step's computation until the end of the backward pass; see `PhaseTime`.
        after: Seconds of the step's computation after the phase.
        communication: The time in which some collective runs.
        exposed: Seconds from the end of `computation` to the end of the phase.
        seconds: Seconds of the step and the phase together.
        memory: An upper bound on the bytes of a rank that the plan needs.
        source: The source of the computation.
        first: The line to change first; None if nothing is exposed.
    """

    phase: str
    computation: float
    after: float
    communication: float
    exposed: float
    seconds: float
    memory: int
    source: str
    first: LineCost | None = None

    def lines(self) -> list[str]:
        """The cost as text."""
        after = f", and {timed(self.after)} after the phase" if self.after else ""
        share = f", {self.exposed / self.seconds:.0%} of it exposed" if self.seconds else ""
        source = "assumed as stated above" if self.source.startswith("assumed") else self.source
        texts = [
            f"computation {timed(self.computation)}{after}, {source}",
            f"communication {timed(self.communication)}, exposed {timed(self.exposed)}",
            f"in all {timed(self.seconds)}{share}; memory of a rank {sized(self.memory)}",
        ]
        if self.first is not None:
            first = self.first
            texts.append(f"change first: line {first.line}, {timed(first.exposed)} exposed: {first.stage}")
            texts += [f"  {text}" for text in first.advice]
        return texts


def step_costs(plan: graph.Plan, schedule: ir.Schedule, prediction: Prediction) -> tuple[StepCost, ...]:
    """The cost of each phase `each step` of `plan` that communicates."""
    nbytes = {entry.phase: entry.nbytes for entry in memory(schedule)}
    costs: list[StepCost] = []
    for phase in (phase for phase in plan.phases if phase.kind == "step"):
        time = prediction.phase(phase.name)
        if not time.network:
            continue
        cost = StepCost(
            phase.name, time.computation, time.after, time.network, time.exposed, time.seconds,
            nbytes[phase.name], prediction.step, _first(phase, schedule, time),
        )  # fmt: skip
        costs.append(cost)
    return tuple(costs)


def exposed_by_line(time: PhaseTime) -> dict[int, float]:
    """The exposed seconds of a phase by line.

    The exposed time is the end of the critical path, so its last parts are charged until it is used up.
    """
    remaining, lines = time.exposed, defaultdict[int, float](float)
    for part in reversed(time.critical):
        if part.line:
            lines[part.line] += min(remaining, part.seconds)
            remaining -= min(remaining, part.seconds)
    return dict(lines)


def _first(phase: graph.Phase, schedule: ir.Schedule, time: PhaseTime) -> LineCost | None:
    """The stage of `phase` with the most exposed time; None if no stage has any."""
    lines = exposed_by_line(time)
    stages = {stage.span.line: stage for stage in phase.stages}
    exposed = {line: seconds for line, seconds in lines.items() if line in stages and seconds > 0}
    if not exposed:
        return None
    line = max(exposed, key=lambda candidate: exposed[candidate])
    stage = stages[line]
    return LineCost(line, stage_text(stage), exposed[line], tuple(_advice(stage, schedule, time)))


def _advice(stage: graph.Stage, schedule: ir.Schedule, time: PhaseTime) -> Iterator[str]:
    """Facts to consider before `stage` is changed.

    These are the best alternative that was tried, which may take longer; how close the whole phase is to its
    lower bound; other values in the buckets of the stage; and a narrower wire type.
    """
    best = _best([choice for choice in schedule.choices if choice.span == stage.span])
    if best is not None:
        alternative, longer = best
        yield f"the best alternative that was tried: {alternative.what}, {compared(longer)}"
    if time.distance <= NEAR_BOUND:
        yield (
            f"the phase alone takes {time.distance:.2f} times its lower bound: fewer bytes or faster links"
            " help, other algorithms help little"
        )
    ops = [op for op in schedule.phase(time.name).ops if op.span == stage.span]
    packed = {graph.name_of(part.value) for op in ops if isinstance(op, ir.Pack) for part in op.parts}
    other_values = packed - {graph.name_of(ref) for ref in graph.operands(stage)}
    if other_values:
        yield f"its buckets carry {listed(sorted(other_values))} too"
    collectives = [op for op in ops if isinstance(op, ir.Collective)]
    is_wide = any(op.dtype in (DType.F32, DType.F64) for op in collectives)
    # With several levels, values that are not yet summed would cross the outer links, which may be slower.
    is_single_level = all(len(_levels(op, schedule)) < 2 for op in collectives)
    if (
        is_wide
        and is_single_level
        and isinstance(stage, graph.Reduce | graph.Scatter)
        and stage.hints.wire is stage.hints.codec is None
    ):
        yield "{ wire = bf16 } sends fewer bytes, and rounds each value"


def _levels(op: ir.Collective, schedule: ir.Schedule) -> set[str]:
    """The levels of the topology that `op` crosses."""
    return {spread.level for name in op.axes for spread in schedule.axis(name).levels if spread.count > 1}


def _best(choices: Sequence[Choice]) -> tuple[Alternative, float] | None:
    """The best alternative, and the ratio of its time to that of its choice; None without predicted times."""
    ratios = [
        (alternative, alternative.seconds / choice.seconds)
        for choice in choices
        if choice.seconds
        for alternative in choice.alternatives
        if alternative.seconds is not None
    ]
    return min(ratios, key=lambda pair: pair[1], default=None)
