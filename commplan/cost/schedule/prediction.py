"""Prediction of a schedule: every phase as tasks on lanes, collectives as flows over the topology."""

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
from commplan.cost.input_time import input_work
from commplan.cost.predictor import Predictor
from commplan.cost.schedule.list_scheduler import ScheduledTask, TaskTiming, chain, play
from commplan.cost.schedule.step import ASSUMED, Order, Readiness, StepComputation, readiness
from commplan.cost.servers.server_traffic import ServerTiming, talk
from commplan.input.measured_costs import InputCosts
from commplan.ir.schedule import Collective, Elastic, Map, Op, Phase, Schedule, operands, results
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Site

DEVICE = "device"
_Cost = tuple[float, CollectiveTime | None]  # seconds alone, and the prediction behind them


class OpTime(msgspec.Struct, frozen=True):
    """One op in time. start, seconds: as simulated. alone: seconds if nothing else were on the network.

    bound: seconds that no algorithm beats; source: where `alone` comes from. nbytes: of each level, what its
    busiest link carries.
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
    """A part of the critical path: ops of one plan line in a row; line 0 is the step's computation."""

    line: int
    what: str
    seconds: float


class PhaseTime(msgspec.Struct, frozen=True):
    """One phase in time, in seconds.

    alone: of the phase with nothing else running. computation: of the step that it runs beside, 0 without
    one. exposed: from the end of that computation to the end of the phase; without a step that is `alone`.
    bound: what the phase's collectives take at least on this topology, overlapping perfectly, and its own
    computation. network, compute: in which some collective, some other op ran. nbytes: of each level, what
    its busiest link carries in one direction, all collectives together. critical, ops: beside the step.
    after: of the step's computation that waits for the phase, where the step says so.
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
        """Of the step and the phase together."""
        return self.computation + self.exposed + self.after

    @property
    def distance(self) -> float:
        """Time alone over the bound; 1 where there is nothing to bound."""
        return self.alone / self.bound if self.bound > 0 else 1.0


class Prediction(msgspec.Struct, frozen=True):
    """A schedule in time.

    source: where the figures come from. step: the computation that they are beside. unknown: what was
    charged nothing because its cost is not known. talks: ops that talk with servers.
    """

    plan: str
    topology: str
    backend: str
    ranks: int
    phases: tuple[PhaseTime, ...]
    source: str
    step: str
    unknown: tuple[str, ...] = ()
    calibrated: str = ""  # the date of the calibration, "" for the model alone
    talks: tuple[ServerTiming, ...] = ()

    def phase(self, name: str) -> PhaseTime:
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
    """Run every phase of `schedule` once, on the network of `predictor`, beside `step`.

    step: the computation of a step; without one, that of `ASSUMED`. compute: seconds of one call of a
    function, or of one read of a source, by name; what is not in it takes no time and is named in `unknown`.
    measured: what reads and host functions were measured to cost, for those that are not in `compute`.
    order: name -> leaf paths in the order in which the backward pass makes them. assumed_on: the machine that
    the step is assumed for, to compare several beside one step; by default that of `predictor`. Ops of the
    compiler's own (packing, sums) are charged for their bytes.
    """
    charge = _Charge(schedule, predictor, compute or {}, measured)
    machine = assumed_on or predictor
    ready = [readiness(schedule, phase, machine, step, order or {}) for phase in schedule.phases]
    phases = tuple(_phase(*each, charge) for each in zip(schedule.phases, ready, strict=True))
    ranks, name = math.prod(schedule.mesh_sizes.values()), predictor.network.topology.name
    date = predictor.calibration.date if predictor.calibration else ""
    source = f"calibrated {date}" if date else "costs of the topology file, not measured"
    computation = "none: what the program computes is not included"
    if any(each.seconds for each in ready):
        on = f", on {assumed_on.network.topology.name}" if assumed_on is not None else ""
        computation = step.source if step is not None else f"assumed: {ASSUMED}{on}"
    unknown, talks = tuple(charge.unknown), tuple(charge.talks)
    return Prediction(
        schedule.plan, name, schedule.backend, ranks, phases, source, computation, unknown, date, talks
    )


class _Charge:
    """What an op costs alone."""

    def __init__(
        self, schedule: Schedule, predictor: Predictor, compute: Mapping[str, float],
        measured: InputCosts | None,
    ) -> None:  # fmt: skip
        self.schedule, self.predictor, self.compute = schedule, predictor, compute
        self.measured, self.input = measured, dict[str, float]()
        self.unknown: dict[str, None] = {}
        self.entry = {value.id: value.nbytes for value in schedule.entry}
        self.sites = sites(schedule)
        self.here: dict[str, Site] = {}
        self.period = 1
        self.talks: list[ServerTiming] = []

    def enter(self, phase: Phase) -> None:
        """Look up what the input of `phase` was measured to cost, and where it talks with servers."""
        self.here = {site.result: site for site in self.sites.all if site.phase == phase.name}
        self.period = phase.period
        if self.measured is not None:
            topology = self.predictor.network.topology
            self.input = input_work(self.schedule, phase, self.measured, topology)

    def of(self, op: Op, nbytes: Mapping[str, int]) -> _Cost:
        """Seconds, and the prediction behind them for what communicates. nbytes: of the phase's values."""
        first = next(iter(results(op)), "")
        if first in self.here:
            traffic, prediction = talk(self.here[first], self.sites, self.predictor, self.period)
            self.talks.append(traffic)
            return prediction.seconds, prediction
        work = op.work(nbytes, lambda axes: self.predictor.layout(axes).ranks)
        if work.kind == "copy":
            return work.nbytes * self.predictor.network.gamma, None
        if work.kind == "call":
            prediction, known = None, self.compute.get(work.name, self.input.get(first))
        else:
            prediction = self.predictor.query(work)
            known = prediction.seconds if prediction else None
        if known is None:
            self.unknown[work.label] = None
        return known or 0.0, prediction


class _Played(NamedTuple):
    """A phase in time: what each of its ops costs, its tasks, when they run, and bytes by level."""

    costs: list[_Cost]
    tasks: list[ScheduledTask]
    timings: tuple[TaskTiming, ...]
    nbytes: tuple[tuple[str, float], ...]

    @property
    def end(self) -> float:
        return max((timing.end for timing in self.timings), default=0.0)

    def exposed(self, ready: Readiness) -> float:
        return max(0.0, self.end - ready.seconds)


def _played(phase: Phase, ready: Readiness, charge: _Charge) -> _Played:
    nbytes = charge.entry | {value.id: value.nbytes for value in phase.values}
    charge.enter(phase)
    costs = [charge.of(op, nbytes) for op in phase.ops]
    total = dict.fromkeys((level.name for level in charge.predictor.network.levels), 0.0)
    for _, prediction in costs:
        for level, size in prediction.nbytes if prediction else ():
            total[level] += size
    tasks = _tasks(phase.ops, costs, ready, charge)
    return _Played(costs, tasks, play(tasks), tuple(total.items()))


def predict_exposed(
    schedule: Schedule, phase: Phase, predictor: Predictor, ready: Readiness,
    measured: InputCosts | None = None,
) -> tuple[float, float]:  # fmt: skip
    """The exposed seconds of one phase of `schedule`, and the bytes on its busiest links together.

    As `predict` has them, without the rest. ready: see `commplan.cost.schedule.step.readiness`.
    """
    played = _played(phase, ready, _Charge(schedule, predictor, {}, measured))
    return played.exposed(ready), sum(nbytes for _, nbytes in played.nbytes)


def _phase(phase: Phase, ready: Readiness, charge: _Charge) -> PhaseTime:
    played = _played(phase, ready, charge)
    costs, timings = played.costs, played.timings
    ops = tuple(
        _op_time(op, seconds, prediction, when)
        for op, (seconds, prediction), when in zip(phase.ops, costs, timings, strict=True)
    )
    alone = played.end
    if ready.seconds:
        unreleased = play([replace(task, release=0.0) for task in played.tasks])
        alone = max((when.end for when in unreleased), default=0.0)
    spans = [(when.start, when.end) for when in timings]
    moves = [prediction is not None for _, prediction in costs]
    moving, working = compress(spans, moves), compress(spans, map(not_, moves))
    bound = min(alone, _bound(phase.ops, costs, charge))
    return PhaseTime(
        phase.name, alone, ready.seconds, played.exposed(ready), bound, _covered(moving), _covered(working),
        played.nbytes, _critical(ops, timings), ops, ready.after,
    )  # fmt: skip


def _tasks(
    ops: Sequence[Op], costs: Sequence[_Cost], ready: Readiness, charge: _Charge
) -> list[ScheduledTask]:
    """One task for each op. A split collective leaves the device free, a blocking one under MPI does not."""
    maker: dict[str, int] = {}
    split = {index for index, op in enumerate(ops) if op.is_split}
    blocking = charge.schedule.backend == "mpi"
    tasks: list[ScheduledTask] = []
    for index, (op, (seconds, prediction)) in enumerate(zip(ops, costs, strict=True)):
        reads = [maker[ref] for ref in operands(op) if ref in maker]
        after = [maker[ref] for ref in op.after if ref in maker]
        blocks = blocking and isinstance(op, Collective) and index not in split
        lanes = (op.lane, DEVICE) if blocks else (op.lane,)
        begun = tuple(before for before in after if before in split)
        needs = (*reads, *(before for before in after if before not in split))
        use = _use(seconds, prediction, charge)
        tasks.append(ScheduledTask(lanes, needs, seconds, use, begun, ready.release(op)))
        for ref in results(op):
            maker[ref] = index
    return tasks


def _use(seconds: float, prediction: CollectiveTime | None, charge: _Charge) -> tuple[float, ...]:
    """How busy the busiest link of each level is while the op runs alone."""
    if prediction is None or seconds <= 0:
        return ()
    bandwidths: list[float] = charge.predictor.network.bandwidths.tolist()
    pairs = zip(prediction.nbytes, bandwidths, strict=True)
    return tuple(min(1.0, size / bandwidth / seconds) for (_, size), bandwidth in pairs)


def _op_time(op: Op, seconds: float, prediction: CollectiveTime | None, when: TaskTiming) -> OpTime:
    kind = type(op).__name__.lower()
    name = op.kind if isinstance(op, Collective) else op.fn if isinstance(op, Map) else kind
    name = f"elastic {op.mode}" if isinstance(op, Elastic) and op.mode != "sync" else name
    how = (str(op.algorithm), op.form or "") if isinstance(op, Collective) else ("", "")
    bound, source, nbytes = 0.0, "", ()
    if prediction is not None:
        bound, source, nbytes = prediction.bound, prediction.source, prediction.nbytes
    values, took = ", ".join(results(op)), when.end - when.start
    return OpTime(name, values, op.span.line, op.lane, when.start, took, seconds, *how, bound, source, nbytes)


def _bound(ops: Sequence[Op], costs: Sequence[_Cost], charge: _Charge) -> float:
    """No collective is faster than its own bound, and links of a level carry what all of them must."""
    network = charge.predictor.network
    links = np.zeros(len(network.levels))
    lanes: dict[str, float] = {}
    alone: list[float] = []
    for op, (seconds, prediction) in zip(ops, costs, strict=True):
        if prediction is None:
            lanes[op.lane] = lanes.get(op.lane, 0.0) + seconds
            continue
        alone.append(prediction.bound)
        if isinstance(op, Collective) and op.kind != "broadcast":  # roots differ, so do the busiest links
            links += charge.predictor.least_bytes(op) / network.bandwidths
    return max([*lanes.values(), *alone, *links.tolist()])


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total = last = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _critical(ops: Sequence[OpTime], played: Sequence[TaskTiming]) -> tuple[Stretch, ...]:
    path = chain(played)
    stretches = [Stretch(0, "computation", played[path[0]].start)] if path and played[path[0]].start else []
    for index in path:
        op = ops[index]
        label = f"{op.op} via {op.algorithm}" if op.algorithm else op.op
        if op.seconds <= 0:
            continue
        if stretches and (stretches[-1].line, stretches[-1].what) == (op.line, label):
            stretches[-1] = Stretch(op.line, label, stretches[-1].seconds + op.seconds)
        else:
            stretches.append(Stretch(op.line, label, op.seconds))
    return tuple(stretches)
