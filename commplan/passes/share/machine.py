"""The machine in the sharing model: the hosts of members, and the times of transfers between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from commplan.cost.collective.cost import CollectiveQuery, collective_time
from commplan.cost.network.network import Layout
from commplan.cost.schedule.predictor import Predictor
from commplan.input.costs import Links, Setting
from commplan.input.measured_costs import InputCosts
from commplan.input.prefetch import device_prefetch, prefetch, threads
from commplan.input.work_partition import HostTransfer
from commplan.ir.plan import Algorithm, Ref
from commplan.ir.schedule import Op, Schedule
from commplan.passes.base import PassContext
from commplan.topology import Topology

# The fraction by which preprocessing slows down if more processes make records than the host has cores.
# Measured with twelve decoders on one or two cores: -0.04 to 0.22 (docs/benchmarks/input.md).
OVERSUBSCRIPTION_COST = 0.1


class InputFlow(NamedTuple):
    """A connected set of host ops.

    Attributes:
        ops: The ops, in the order of the phase.
        ends: For each value at which shared work may end, the values at which it may be cut. The work before
            the cut is shared.
        over: The ensemble axes of the members that share.
    """

    ops: Sequence[Op]
    ends: dict[Ref, list[Ref]]
    over: tuple[str, ...]


def setting_of(
    schedule: Schedule, phase: str, flow: InputFlow, rows: int, measured: InputCosts, context: PassContext
) -> tuple[Setting, Links | None]:
    """The arguments of the sharing model for one flow.

    Args:
        schedule: The schedule.
        phase: The name of the phase.
        flow: The flow.
        rows: The number of records that each member receives in a step.
        measured: Measured costs of the input.
        context: Has the topology. Without one, all members are assumed to run on one host.

    Returns:
        The setting, and the times of transfers between hosts; None without a topology.

    Raises:
        CommplanError: CP0750 if an axis does not fit the topology, CP0713 if there are too many ranks.
    """
    topology, links = context.topology, None
    members = schedule.size(flow.over)
    ranks = schedule.size(tuple(axis.name for axis in schedule.mesh_axes))
    groups = ((0,) * members,) * max(1, ranks // members)
    if topology is not None:
        groups, links = _hosts_and_links(schedule, topology, flow.over, context)
    cores = (topology.cores if topology else None) or measured.cores
    consumer = measured.consumer_of(schedule.plan, phase)
    setting = Setting(
        rows=rows,
        groups=groups,
        cores=cores,
        threads=threads(flow.ops, cores),
        record=measured.record,
        batch=measured.batch,
        crossing=measured.crossing,
        step=consumer.seconds if consumer else 0.0,
        step_cpu=consumer.cpu if consumer else 0.0,
        by_caller=schedule.backend == "jax",
        slots=1 + prefetch(flow.ops) + device_prefetch(flow.ops),
        oversubscription=OVERSUBSCRIPTION_COST,
    )
    return setting, links


def _hosts_and_links(
    schedule: Schedule, topology: Topology, over: tuple[str, ...], context: PassContext
) -> tuple[tuple[tuple[int, ...], ...], Links]:
    """The number of the host of each member of each group, and the transfer times between hosts."""
    calibration = context.calibration.links if context.calibration else None
    backend = schedule.backend
    predictor = Predictor(
        topology, schedule.axes, calibration=calibration, backend=backend, places=context.places
    )
    places, network = predictor.layout(over).groups, predictor.network
    hosts = places // topology.host_places

    @cache
    def links(leaders: tuple[int, ...], move: HostTransfer, nbytes: float) -> float:
        """The seconds of `move` among the members `leaders` of all groups (`commplan.input.costs.Links`)."""
        layout = Layout(places[:, list(leaders)])
        query = CollectiveQuery(move.kind, layout, nbytes, network, backend, root=move.root)
        prediction = collective_time(Algorithm("native"), query, calibration)
        return prediction.seconds if prediction else 0.0

    return tuple(tuple(row) for row in hosts.tolist()), links
