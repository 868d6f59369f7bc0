"""The computation next to which a phase runs, and when its gradients are available.

The computation is called a step. Unless a step is specified, one is assumed (`ASSUMED`). It depends only on
the plan, its shapes and the machine. Passes thus compare all schedules of a plan with the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from commplan.cost.collective.bounds import busiest_bytes
from commplan.cost.schedule.predictor import Predictor
from commplan.ir import plan as graph
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Backend, Op, Pack, Phase, Schedule, Value, operands

# By the name of an input: the paths of its leaves in the order of the backward pass.
Order = Mapping[str, Sequence[str]]
# The description of the assumed step in predictions.
ASSUMED = (
    "a backward pass that takes the minimum time of the busiest links for its reductions in the types of the "
    "leaves, and that computes leaves in reverse order, in proportion to their bytes"
)


class StepComputation(msgspec.Struct, frozen=True):
    """A step without its communication.

    Attributes:
        seconds: The seconds until all gradients are available.
        ready: For some leaves, the name of the input, the path of the leaf, and the seconds until it is
            available. Other leaves of these inputs are available after `seconds`, and other inputs from the
            start.
        source: A description of the source of the times.
        after: Seconds of computation that depends on the results of the plan; 0 if unknown.
    """

    seconds: float
    ready: tuple[tuple[str, str, float], ...]
    source: str
    after: float = 0.0

    @property
    def order(self) -> dict[str, tuple[str, ...]]:
        """The leaves in `ready` of each input, the first available one first."""
        paths: dict[str, list[str]] = {}
        for name, path, _ in sorted(self.ready, key=lambda leaf: leaf[2]):
            paths.setdefault(name, []).append(path)
        return {name: tuple(ordered) for name, ordered in paths.items()}


class Readiness(msgspec.Struct, frozen=True):
    """When the leaves that a phase reads are available. Times are in seconds from the start of the step.

    Attributes:
        seconds: The time of the step's computation; 0 without a step.
        leaves: For each value that the step computes, the time of each leaf. Other values are available from
            the start.
        after: The seconds of computation that depends on the phase; 0 if unknown.
    """

    seconds: float = 0.0
    leaves: Mapping[Ref, tuple[float, ...]] = {}
    after: float = 0.0

    def release(self, op: Op) -> float:
        """The earliest start of `op`: when the last leaf that it reads is available."""
        if not self.leaves:
            return 0.0
        if isinstance(op, Pack):
            times = (self.leaves[part.value][part.leaf] for part in op.parts if part.value in self.leaves)
            return max(times, default=0.0)
        read = (time for ref in operands(op) for time in self.leaves.get(ref, ()))
        return max(read, default=0.0)


def readiness(
    schedule: Schedule, phase: Phase, predictor: Predictor, step: StepComputation | None, order: Order
) -> Readiness:
    """When the leaves that `phase` reads are available.

    Args:
        schedule: The schedule.
        phase: One of its phases.
        predictor: The machine of the assumed step.
        step: The step; None for the assumed one.
        order: The order of leaves in the assumed step. Inputs that it lacks are computed in reverse order.

    Returns:
        The times. Without a computation, if the phase reads no value that the step computes.
    """
    return (
        _assumed_readiness(schedule, phase, predictor, order)
        if step is None
        else _readiness_in(schedule, phase, step)
    )


def _readiness_in(schedule: Schedule, phase: Phase, step: StepComputation) -> Readiness:
    """`readiness` for a specified step."""
    times = {(name, path): seconds for name, path, seconds in step.ready}
    named = {name for name, _ in times}
    leaves = {
        value.id: tuple(times.get((name_of(value.id), leaf.path), step.seconds) for leaf in value.leaves)
        for value in schedule.entry
        if value.id in phase.inputs and name_of(value.id) in named
    }
    return Readiness(step.seconds, leaves, after=step.after) if leaves else Readiness()


def _assumed_readiness(schedule: Schedule, phase: Phase, predictor: Predictor, order: Order) -> Readiness:
    """`readiness` for the assumed step, which computes the operands of `gradient_stages`."""
    entry = {value.id: value for value in schedule.entry if value.id in phase.inputs}
    network = predictor.network
    busy = np.zeros(len(network.levels))
    ordered: list[tuple[Value, int]] = []  # leaves in the order of computation
    for stage in gradient_stages(schedule, phase.name):
        value = entry.get(stage.operand)
        if value is None or any(value is seen_value for seen_value, _ in ordered):
            continue
        layout = predictor.layout(stage.axes)
        busy += busiest_bytes(str(stage.COLLECTIVE), value.nbytes, layout, network) / network.bandwidths
        ordered += [(value, leaf) for leaf in _in_backward_order(value, order)]
    seconds = float(busy.max(initial=0.0))
    total = sum(value.leaves[leaf].nbytes for value, leaf in ordered)
    if not seconds or not total:
        return Readiness()
    times = {value.id: [0.0] * len(value.leaves) for value, _ in ordered}
    done = 0
    for value, leaf in ordered:
        done += value.leaves[leaf].nbytes
        times[value.id][leaf] = seconds * done / total
    return Readiness(seconds, {ref: tuple(each) for ref, each in times.items()})


def gradient_stages(schedule: Schedule, phase: str) -> Iterator[graph.Reduce | graph.Scatter]:
    """Yield the reductions of `phase` that can overlap with the computation of their operands.

    There are none if the schedule does not contain its plan.
    """
    plan = schedule.origin.plan if schedule.origin is not None else None
    for stage in (
        next((candidate.stages for candidate in plan.phases if candidate.name == phase), ()) if plan else ()
    ):
        if isinstance(stage, graph.Reduce | graph.Scatter) and is_overlappable(stage, schedule.backend):
            yield stage


def is_overlappable(stage: graph.Reduce | graph.Scatter, backend: Backend) -> bool:
    """Whether a reduction can overlap with computation: always in JAX, with the hint `overlap` under MPI."""
    return backend == "jax" or stage.hints.overlap is not None


def _in_backward_order(value: Value, order: Order) -> Sequence[int]:
    """The indices of the leaves of a gradient in the order of the backward pass.

    Leaves that `order` does not list come last.
    """
    listed = order.get(name_of(value.id))
    if listed is None:
        return range(len(value.leaves))[::-1]
    indices = {path: index for index, path in enumerate(listed)}
    return sorted(range(len(value.leaves)), key=lambda leaf: indices.get(value.leaves[leaf].path, math.inf))
