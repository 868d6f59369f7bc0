"""The machine as the model of sharing sees it: who runs on which host, and what moves between them take."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.input.ahead import prefetch, threads
from commplan.input.costs import Links, Setting
from commplan.input.division import Move
from commplan.input.measured import InputCosts
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Op, Schedule
from commplan.passes.base import Context
from commplan.passes.rewrite import Editor
from commplan.simulate.cost import predict
from commplan.simulate.network import Layout
from commplan.simulate.predictor import Predictor
from commplan.topology import Topology

COLD = 0.1  # measured of twelve decoders on one core or two: -0.04 to 0.22, docs/benchmarks.md


def setting_of(
    editor: Editor, phase: str, ops: Sequence[Op], over: tuple[str, ...], rows: int, context: Context
) -> tuple[Setting, Links | None]:
    """The setting of the flow `ops`, whose members along `over` get `rows` records a step.

    Without a topology all members run on one host, and nothing moves. Raises CP0750 where an axis does not
    lie on the topology, ValueError where the context has no measured input.
    """
    measured = context.calibration.input if context.calibration else None
    if measured is None:
        raise ValueError("nothing was measured")
    schedule, topology = editor.schedule, context.topology
    members, links = schedule.size(over), None
    ranks = schedule.size(tuple(axis.name for axis in schedule.mesh_axes))
    groups = ((0,) * members,) * max(1, ranks // members)
    if topology is not None:
        groups, links = _placed(schedule, topology, over, context)
    return _setting(schedule, phase, ops, rows, groups, measured, topology), links


def _setting(
    schedule: Schedule,
    phase: str,
    ops: Sequence[Op],
    rows: int,
    groups: tuple[tuple[int, ...], ...],
    measured: InputCosts,
    topology: Topology | None,
) -> Setting:
    cores = (topology.cores if topology else None) or measured.cores
    consumer = measured.consumer_of(schedule.plan, phase)
    return Setting(
        rows=rows,
        groups=groups,
        cores=cores,
        threads=threads(ops, cores),
        record=measured.record,
        batch=measured.batch,
        crossing=measured.crossing,
        step=consumer.seconds if consumer else 0.0,
        step_cpu=consumer.cpu if consumer else 0.0,
        by_caller=schedule.backend == "jax",
        slots=1 + prefetch(ops),
        cold=COLD,
    )


def _placed(
    schedule: Schedule, topology: Topology, over: tuple[str, ...], context: Context
) -> tuple[tuple[tuple[int, ...], ...], Links]:
    """The host of every member of every group, and what moves between hosts take."""
    calibration = context.calibration.links if context.calibration else None
    predictor = Predictor(
        topology, schedule.axes, calibration=calibration, backend=schedule.backend, places=context.places
    )
    places = predictor.layout(over).groups
    times: dict[tuple[tuple[int, ...], str, int, float], float] = {}

    def links(leaders: Sequence[int], move: Move, nbytes: float) -> float:
        key = (tuple(leaders), move.kind, move.root, nbytes)
        if key not in times:
            found = predict(
                Algorithm("native"),
                move.kind,
                Layout(places[:, list(leaders)]),
                nbytes,
                predictor.network,
                calibration=calibration,
                backend=schedule.backend,
                root=move.root,
            )
            times[key] = found.seconds if found else 0.0
        return times[key]

    return tuple(tuple(row) for row in (places // topology.host_places).tolist()), links
