"""Predicts a schedule: ops are tasks on lanes, and collectives are flows on the topology's links.

`predictor`, `server_traffic` and `input_time` provide the cost of each op without other ops, and
`list_scheduler` simulates them together. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import NamedTuple

import msgspec
import numpy as np

from commplan.cost.collective.cost import CollectiveTime
from commplan.cost.schedule.input_time import input_work
from commplan.cost.schedule.list_scheduler import LaneTask, TaskTiming, critical_path, run_tasks
from commplan.cost.schedule.predictor import Predictor
from commplan.cost.schedule.server_traffic import ServerTiming, server_timing
from commplan.cost.schedule.step import ASSUMED, Order, Readiness, StepComputation, readiness
from commplan.input.measured_costs import InputCosts
from commplan.ir.schedule import Collective, Elastic, Map, Op, Phase, Schedule, operands, results
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Site

DEVICE = "device"  # the lane of computation on devices, which blocking collectives under MPI occupy too
# Seconds of an op without other ops, and the prediction if the op communicates.
_Cost = tuple[float, CollectiveTime | None]


class OpTime(msgspec.Struct, frozen=True):
    """The predicted time of one op. Times are in seconds.

    Attributes:
        op: The kind of a collective, the name of a function, or the kind of another op.
        result: The names of its results, separated by commas.
        line: Its line in the plan.
        lane: Its lane.
        start: The start from the beginning of the step's computation, or of the phase without a step.
        seconds: The simulated duration, with other traffic on the network.
        alone: The time without other traffic on the network.
        algorithm: The algorithm of a collective; "" for other ops.
        form: The form of a collective; "" for other ops, and if the schedule does not specify it.
        bound: A lower bound for all algorithms; 0 if the op does not communicate.
        source: The source of `alone`, as in `CollectiveTime`; "" if the op does not communicate.
        nbytes: For each level, its name and the bytes on its busiest link in one direction; empty if the op
            does not communicate.
    """

    op: str
    result: str
    line: int
    lane: str
    start: float
    seconds: float
    alone: float
    algorithm: str = ""
    form: str = ""
    bound: float = 0.0
    source: str = ""
    nbytes: tuple[tuple[str, float], ...] = ()


class Stretch(msgspec.Struct, frozen=True):
    """A part of the critical path: consecutive ops of one plan line.

    Attributes:
        line: The line in the plan; 0 for the step's computation.
        label: A description of the ops, such as `all_reduce via ring`; `what` in JSON.
        seconds: The duration.
    """

    line: int
    label: str = msgspec.field(name="what")
    seconds: float


class PhaseTime(msgspec.Struct, frozen=True):
    """The predicted time of one phase. Times are in seconds.

    Attributes:
        name: The name of the phase.
        alone: The time of the phase without a step.
        computation: The time of the step's computation before the phase ends; 0 without a step.
        exposed: From the end of that computation to the end of the phase, at least 0; `alone` without a step.
        bound: A lower bound of `alone`, from the phase's own computation and from its collectives with
            perfect overlap.
        network: The time while at least one op communicates.
        compute: The time while at least one other op runs.
        nbytes: For each level, innermost first, its name and the bytes on its busiest link in one direction,
            added over all ops that communicate.
        critical: The critical path, in the order of time.
        ops: The ops in the order of the schedule.
        after: The step's computation after the phase; 0 if the step does not specify it.
    """

    name: str
    alone: float
    computation: float
    exposed: float
    bound: float
    network: float
    compute: float
    nbytes: tuple[tuple[str, float], ...]
    critical: tuple[Stretch, ...]
    ops: tuple[OpTime, ...]
    after: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of the step and the phase together."""
        return self.computation + self.exposed + self.after

    @property
    def distance(self) -> float:
        """The ratio of `alone` to `bound`; 1 if there is no bound."""
        return self.alone / self.bound if self.bound > 0 else 1.0


class Prediction(msgspec.Struct, frozen=True):
    """The predicted time of a schedule.

    Attributes:
        plan: The name of the plan.
        topology: The name of the topology.
        backend: The backend.
        ranks: The number of ranks, without servers.
        phases: The phases in the order of the schedule.
        source: A description of the source of the costs.
        step: A description of the step's computation.
        unknown: Labels of ops without a known cost. They take no time in the prediction.
        calibrated: The date of the calibration; "" if there is none.
        server_timings: The ops that communicate with servers, in the order of the schedule; `talks` in JSON.
    """

    plan: str
    topology: str
    backend: str
    ranks: int
    phases: tuple[PhaseTime, ...]
    source: str
    step: str
    unknown: tuple[str, ...] = ()
    calibrated: str = ""
    server_timings: tuple[ServerTiming, ...] = msgspec.field(default=(), name="talks")

    def phase(self, name: str) -> PhaseTime:
        """The phase `name`, which must be one of the schedule."""
        return next(phase for phase in self.phases if phase.name == name)


def predict(
    schedule: Schedule,
    predictor: Predictor,
    step: StepComputation | None = None,
    *,
    compute: Mapping[str, float] | None = None,
    measured: InputCosts | None = None,
    order: Order | None = None,
    assumed_on: Predictor | None = None,
) -> Prediction:
    """Predict one run of every phase of `schedule` next to the computation of a step.

    Ops of the compiler, such as packing and local sums, are charged for their bytes.

    Args:
        schedule: The schedule.
        predictor: The machine.
        step: The computation of the step; None for the assumed step (`ASSUMED`).
        compute: Seconds of one call of a function, or of one read of a source, by name.
        measured: Measured costs of reads and host functions, for those that are not in `compute`. Functions
            and sources in neither take no time and are listed in `Prediction.unknown`.
        order: By input, leaf paths in the order of the backward pass, for the assumed step. None for the
            reverse order of the leaves.
        assumed_on: The machine of the assumed step; None for that of `predictor`. Used to compare several
            machines with the same step.

    Returns:
        The prediction of all phases.
    """
    charge = _Charge(schedule, predictor, compute or {}, measured)
    machine = assumed_on or predictor
    ready = [readiness(schedule, phase, machine, step, order or {}) for phase in schedule.phases]
    phases = tuple(_phase(*each, charge) for each in zip(schedule.phases, ready, strict=True))
    ranks, name = math.prod(schedule.mesh_sizes.values()), predictor.network.topology.name
    date = predictor.calibration.date if predictor.calibration else ""
    source = f"calibrated {date}" if date else "costs of the topology file, not measured"
    computation = "none: the program's own computation is not included"
    if any(each.seconds for each in ready):
        on = f", on {assumed_on.network.topology.name}" if assumed_on is not None else ""
        computation = step.source if step is not None else f"assumed: {ASSUMED}{on}"
    unknown, server_timings = tuple(charge.unknown), tuple(charge.server_timings)
    return Prediction(
        schedule.plan,
        name,
        schedule.backend,
        ranks,
        phases,
        source,
        computation,
        unknown,
        date,
        server_timings,
    )


class _Charge:
    """Computes the cost of each op of a schedule without other ops.

    Collects the labels of ops without a known cost in `unknown`, as keys in order, and the ops that
    communicate with servers in `server_timings`. `enter` sets `site_of`, `period` and `input` for one phase.
    """

    def __init__(
        self, schedule: Schedule, predictor: Predictor, compute: Mapping[str, float],
        measured: InputCosts | None,
    ) -> None:  # fmt: skip
        self.schedule, self.predictor, self.compute = schedule, predictor, compute
        self.measured, self.input = measured, dict[str, float]()
        self.unknown: dict[str, None] = {}
        self.entry = {value.id: value.nbytes for value in schedule.entry}
        self.sites = sites(schedule)
        self.site_of: dict[str, Site] = {}
        self.period = 1
        self.server_timings: list[ServerTiming] = []

    def enter(self, phase: Phase) -> None:
        """Select `phase`: its requests to servers, and the measured costs of its input."""
        self.site_of = {site.result: site for site in self.sites.all if site.phase == phase.name}
        self.period = phase.period
        if self.measured is not None:
            topology = self.predictor.network.topology
            self.input = input_work(self.schedule, phase, self.measured, topology)

    def cost(self, op: Op, nbytes: Mapping[str, int]) -> _Cost:
        """The cost of `op`, with 0 seconds if it is unknown. `nbytes` are the bytes of each value."""
        first = next(iter(results(op)), "")
        if first in self.site_of:
            traffic, prediction = server_timing(self.site_of[first], self.sites, self.predictor, self.period)
            self.server_timings.append(traffic)
            return prediction.seconds, prediction
        work = op.work(nbytes, lambda axes: self.predictor.layout(axes).ranks)
        if work.kind == "copy":
            return work.nbytes * self.predictor.network.gamma, None
        if work.kind == "call":
            prediction, seconds = None, self.compute.get(work.name, self.input.get(first))
        else:
            prediction = self.predictor.query(work)
            seconds = prediction.seconds if prediction else None
        if seconds is None:
            self.unknown[work.label] = None
        return seconds or 0.0, prediction


class _SimulatedPhase(NamedTuple):
    """A simulated phase.

    Attributes:
        costs: The cost of each op without other ops.
        tasks: The task of each op.
        timings: The simulated interval of each op.
        nbytes: As in `PhaseTime`.
    """

    costs: list[_Cost]
    tasks: list[LaneTask]
    timings: tuple[TaskTiming, ...]
    nbytes: tuple[tuple[str, float], ...]

    @property
    def end(self) -> float:
        return max((timing.end for timing in self.timings), default=0.0)

    def exposed(self, ready: Readiness) -> float:
        """Seconds from the end of the step's computation to the end of the phase, at least 0."""
        return max(0.0, self.end - ready.seconds)


def _simulate_phase(phase: Phase, ready: Readiness, charge: _Charge) -> _SimulatedPhase:
    nbytes = charge.entry | {value.id: value.nbytes for value in phase.values}
    charge.enter(phase)
    costs = [charge.cost(op, nbytes) for op in phase.ops]
    total = dict.fromkeys((level.name for level in charge.predictor.network.levels), 0.0)
    for _, prediction in costs:
        for level, size in prediction.nbytes if prediction else ():
            total[level] += size
    tasks = _tasks(phase.ops, costs, ready, charge)
    return _SimulatedPhase(costs, tasks, run_tasks(tasks), tuple(total.items()))


def predict_exposed(
    schedule: Schedule, phase: Phase, predictor: Predictor, ready: Readiness,
    measured: InputCosts | None = None,
) -> tuple[float, float]:  # fmt: skip
    """The `exposed` seconds of one phase as in `predict`, and the sum of its `nbytes` over all levels.

    Faster than `predict`, for passes that compare many schedules.

    Args:
        schedule: The schedule.
        phase: One of its phases.
        predictor: The machine.
        ready: The result of `commplan.cost.schedule.step.readiness` for the phase.
        measured: Measured costs of reads and host functions; None if there are none.
    """
    simulated = _simulate_phase(phase, ready, _Charge(schedule, predictor, {}, measured))
    return simulated.exposed(ready), sum(nbytes for _, nbytes in simulated.nbytes)


def _phase(phase: Phase, ready: Readiness, charge: _Charge) -> PhaseTime:
    """Predict one phase next to the computation that `ready` describes."""
    simulated = _simulate_phase(phase, ready, charge)
    costs, timings = simulated.costs, simulated.timings
    ops = tuple(
        _op_time(op, seconds, prediction, when)
        for op, (seconds, prediction), when in zip(phase.ops, costs, timings, strict=True)
    )
    alone = simulated.end
    if ready.seconds:  # simulate again without the step: all inputs are then available at time 0
        unreleased = run_tasks([replace(task, release=0.0) for task in simulated.tasks])
        alone = max((when.end for when in unreleased), default=0.0)
    spans = [(when.start, when.end) for when in timings]
    communicates = [prediction is not None for _, prediction in costs]
    network_spans = compress(spans, communicates)
    compute_spans = compress(spans, map(not_, communicates))
    bound = min(alone, _bound(phase.ops, costs, charge))
    return PhaseTime(
        phase.name, alone, ready.seconds, simulated.exposed(ready), bound, _union_length(network_spans),
        _union_length(compute_spans), simulated.nbytes, _critical(ops, timings), ops, ready.after,
    )  # fmt: skip


def _tasks(ops: Sequence[Op], costs: Sequence[_Cost], ready: Readiness, charge: _Charge) -> list[LaneTask]:
    """One task per op. A blocking collective under MPI occupies the device, a split one does not."""
    maker: dict[str, int] = {}  # by value: the op that computes it
    split = {index for index, op in enumerate(ops) if op.is_split}
    blocking = charge.schedule.backend == "mpi"
    tasks: list[LaneTask] = []
    for index, (op, (seconds, prediction)) in enumerate(zip(ops, costs, strict=True)):
        reads = [maker[ref] for ref in operands(op) if ref in maker]
        after = [maker[ref] for ref in op.after if ref in maker]
        blocks = blocking and isinstance(op, Collective) and index not in split
        lanes = (op.lane, DEVICE) if blocks else (op.lane,)
        begun = tuple(before for before in after if before in split)
        needs = (*reads, *(before for before in after if before not in split))
        use = _use(seconds, prediction, charge)
        tasks.append(LaneTask(lanes, needs, seconds, use, begun, ready.release(op)))
        for ref in results(op):
            maker[ref] = index
    return tasks


def _use(seconds: float, prediction: CollectiveTime | None, charge: _Charge) -> tuple[float, ...]:
    """The utilization of the busiest link of each level while the op runs alone; empty without traffic."""
    if prediction is None or seconds <= 0:
        return ()
    bandwidths: list[float] = charge.predictor.network.bandwidths.tolist()
    pairs = zip(prediction.nbytes, bandwidths, strict=True)
    return tuple(min(1.0, size / bandwidth / seconds) for (_, size), bandwidth in pairs)


def _op_time(op: Op, seconds: float, prediction: CollectiveTime | None, when: TaskTiming) -> OpTime:
    kind = type(op).__name__.lower()
    name = op.kind if isinstance(op, Collective) else op.fn if isinstance(op, Map) else kind
    name = f"elastic {op.mode}" if isinstance(op, Elastic) and op.mode != "sync" else name
    via = (str(op.algorithm), op.form or "") if isinstance(op, Collective) else ("", "")
    bound, source, nbytes = 0.0, "", ()
    if prediction is not None:
        bound, source, nbytes = prediction.bound, prediction.source, prediction.nbytes
    values, took = ", ".join(results(op)), when.end - when.start
    return OpTime(name, values, op.span.line, op.lane, when.start, took, seconds, *via, bound, source, nbytes)


def _bound(ops: Sequence[Op], costs: Sequence[_Cost], charge: _Charge) -> float:
    """A lower bound on a phase: the maximum of three kinds of bounds.

    These are the time of the ops without communication in each lane, the bound of each op that communicates,
    and the time of each level's busiest link for the bytes of all collectives.
    """
    network = charge.predictor.network
    links = np.zeros(len(network.levels))
    lanes: dict[str, float] = {}
    bounds: list[float] = []
    for op, (seconds, prediction) in zip(ops, costs, strict=True):
        if prediction is None:
            lanes[op.lane] = lanes.get(op.lane, 0.0) + seconds
            continue
        bounds.append(prediction.bound)
        # Broadcasts are left out: their roots differ, and so do their busiest links.
        if isinstance(op, Collective) and op.kind != "broadcast":
            links += charge.predictor.least_bytes(op) / network.bandwidths
    return max([*lanes.values(), *bounds, *links.tolist()])


def _union_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total = last = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _critical(ops: Sequence[OpTime], timings: Sequence[TaskTiming]) -> tuple[Stretch, ...]:
    """The critical path with consecutive ops of one line and description merged.

    Ops that take no time are omitted. The path begins with the step's computation if its first op waited for
    a release.
    """
    path = critical_path(timings)
    parts = [Stretch(0, "computation", timings[path[0]].start)] if path and timings[path[0]].start else []
    for index in path:
        op = ops[index]
        label = f"{op.op} via {op.algorithm}" if op.algorithm else op.op
        if op.seconds <= 0:
            continue
        if parts and (parts[-1].line, parts[-1].label) == (op.line, label):
            parts[-1] = Stretch(op.line, label, parts[-1].seconds + op.seconds)
        else:
            parts.append(Stretch(op.line, label, op.seconds))
    return tuple(parts)
