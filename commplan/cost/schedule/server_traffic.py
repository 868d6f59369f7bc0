"""Predicts the traffic of a plan with its servers, and compares it with alternatives.

The cost model is in `requests`. The comparisons are of the modes of elastic averaging, and of exchanges with
servers and collectives of the workers.
"""

from __future__ import annotations

import math
from typing import get_args

import msgspec

from commplan.collectives import registry
from commplan.collectives.program import Kind
from commplan.cost.collective.cost import CollectiveTime
from commplan.cost.schedule.predictor import Predictor
from commplan.cost.schedule.requests import (
    cost_alone,
    elastic_load,
    places_of_servers,
    request_cost,
    request_traffic,
)
from commplan.ir.assemble import assemble
from commplan.ir.plan import Algorithm, AxisKind
from commplan.ir.schedule import Axis, Elastic, Phase, Schedule
from commplan.ir.types import ElasticMode, ServedMode
from commplan.protocol.chunks import usual
from commplan.protocol.sites import Site, Sites, StateDistribution

SLICE = 64 * 1024  # bytes of a message, if an all-reduce is sliced


class ServerTiming(msgspec.Struct, frozen=True):
    """The prediction for one op that communicates with servers. Times are in seconds.

    Attributes:
        phase: The name of the phase.
        line: The line in the plan.
        kind: `put`, `get`, `exchange` or `elastic`.
        mode: The mode of an elastic average; "" for other kinds.
        staleness: The staleness of an exchange; None if it has none, and for other kinds.
        server: The name of the server declaration.
        workers: The number of workers.
        servers: The number of servers of the declaration.
        places: The places of these servers.
        period: The number of steps between two requests.
        distributions: The distribution of each state over the servers.
        messages_up: The number of messages that one worker sends.
        messages_down: The number of messages that one worker receives.
        nbytes_up: Bytes that one worker sends.
        nbytes_down: Bytes that one worker receives.
        seconds: The time if all workers send at once, until the last one is answered; for a `put`, until its
            messages have arrived.
        alone: The time of a request of the most distant worker while no other worker sends.
        bound: A lower bound of `seconds`.
        busy: The time of the busiest server's processor if all workers send at once.
        limit: A description of the bottleneck.
    """

    phase: str
    line: int
    kind: str
    mode: str
    staleness: int | None
    server: str
    workers: int
    servers: int
    places: tuple[int, ...]
    period: int
    distributions: tuple[StateDistribution, ...]
    messages_up: int
    messages_down: int
    nbytes_up: int
    nbytes_down: int
    seconds: float
    alone: float
    bound: float
    busy: float
    limit: str


class ElasticTiming(msgspec.Struct, frozen=True):
    """The prediction for an elastic exchange in one mode. Times are in seconds.

    Attributes:
        mode: The mode.
        seconds: The time if all workers exchange at once.
        alone: The time of the most distant worker while no other worker exchanges. Equal to `seconds` for
            `sync`.
        implementation: A description, `way` in JSON, such as `2 servers` or `all-reduce via ring`.
    """

    mode: ElasticMode
    seconds: float
    alone: float
    implementation: str = msgspec.field(name="way")


def server_timing(
    site: Site, sites: Sites, predictor: Predictor, period: int
) -> tuple[ServerTiming, CollectiveTime]:
    """Predict the op of `site`.

    Args:
        site: The site.
        sites: All sites of the schedule.
        predictor: The machine.
        period: The number of steps between two requests.

    Returns:
        The prediction in detail, and in the form of a collective.
    """
    traffic, network = request_traffic(site, sites), predictor.network
    places = predictor.servers[site.first : site.first + site.servers]
    joint = request_cost(traffic, predictor.workers, places, network)
    single = cost_alone(traffic, predictor.workers, places, network)
    timing = assemble(
        ServerTiming, site, joint,
        line=site.span.line, mode=site.mode or "", workers=sites.workers, period=period,
        places=tuple(map(int, places)), alone=single.seconds,
        messages_up=int(traffic.messages_up.sum()), messages_down=int(traffic.messages_down.sum()),
        nbytes_up=int(traffic.up.sum()), nbytes_down=int(traffic.down.sum()),
    )  # fmt: skip
    return timing, joint.prediction(network)


def elastic_modes(
    predictor: Predictor, over: tuple[str, ...], nbytes: float, servers: int = 1
) -> tuple[ElasticTiming, ...]:
    """Predict every mode of elastic averaging.

    Args:
        predictor: The machine.
        over: The names of the axes of the workers that average.
        nbytes: Bytes of the averaged value.
        servers: The number of servers of the center.

    Returns:
        The modes with servers, then `sync` with the fastest flat all-reduce.
    """
    network, workers = predictor.network, predictor.workers
    units = max(1, math.ceil(nbytes / servers / usual(int(nbytes), servers)))
    traffic = elastic_load(nbytes, servers, units)
    places = predictor.servers[:servers]
    if len(places) < servers:  # the plan has none
        places = places_of_servers(network, (Axis("center", AxisKind.SERVER, servers),), workers)
    times = (
        request_cost(traffic, workers, places, network).seconds,
        cost_alone(traffic, workers, places, network).seconds,
    )
    way = f"{servers} server{'s' * (servers != 1)}"
    modes: tuple[ServedMode, ...] = get_args(ServedMode)
    exchanges = [ElasticTiming(mode, *times, way) for mode in modes]
    seconds, name = _fastest(predictor, "all_reduce", over, nbytes)
    return (*exchanges, ElasticTiming("sync", seconds, seconds, f"all-reduce via {name}"))


def elastic_of(
    schedule: Schedule, phase: Phase, op: Elastic, predictor: Predictor
) -> tuple[ElasticTiming, ...]:
    """Predict every mode for the average of `op`, on as many servers as its center has, or on one."""
    values = {value.id: value for value in (*schedule.entry, *phase.values)}
    server = values[op.center].placement.server
    count = schedule.axis(server).size if server is not None else 1
    return elastic_modes(predictor, op.axes, values[op.operand].nbytes, count)


def _fastest(predictor: Predictor, kind: Kind, over: tuple[str, ...], nbytes: float) -> tuple[float, str]:
    """The fastest flat algorithm, as seconds and name. `nbytes` are those of one rank's operand."""
    times: list[tuple[float, str]] = []
    for name in ("native", *registry.algorithms(kind)):
        for chunk in (None, SLICE):
            timing = predictor.predict(kind, Algorithm(name), over, nbytes, chunk=chunk)
            if timing is not None:
                times.append((timing.seconds, name))
    return min(times)


def alternatives_to_servers(predictor: Predictor, site: Site, sites: Sites) -> tuple[tuple[str, float], ...]:
    """Predict an exchange without servers, with its states sharded over the workers and replicated on them.

    Returns:
        Pairs of a description and seconds. Empty for sites of other kinds, and if no axis with several
        workers shares the states.
    """
    over = tuple(name for name, size in sites.axes if name not in site.per and size > 1)
    if site.kind != "exchange" or not over:
        return ()
    nbytes = float(sum(site.layout.loads))
    ranks = predictor.layout(over).ranks
    scatter, scatter_name = _fastest(predictor, "reduce_scatter", over, nbytes)
    gather, gather_name = _fastest(predictor, "all_gather", over, nbytes / ranks)
    all_reduce, reduce_name = _fastest(predictor, "all_reduce", over, nbytes)
    parts = f"scatter via {scatter_name}, gather via {gather_name}"
    return (
        (f"states sharded over the workers: {parts}", scatter + gather),
        (f"states replicated on the workers: all-reduce via {reduce_name}", all_reduce),
    )


def waiting(exchange: ElasticTiming, compute: float) -> tuple[float, float]:
    """The smallest and the largest share of time that a worker communicates.

    The share is largest if all workers always arrive at once, so that each waits for all. In `round_robin`
    and `sync` this is always so. In other modes it is smallest if the workers are spread over time. Then the
    server is free when a worker arrives, or it is never idle.

    Args:
        exchange: The exchange.
        compute: Seconds of computation between two exchanges.
    """
    maximum = exchange.seconds / (exchange.seconds + compute)
    if exchange.mode in ("round_robin", "sync"):
        return maximum, maximum
    period = max(compute + exchange.alone, exchange.seconds)
    return min(maximum, 1 - compute / period), maximum


def least_compute(exchange: ElasticTiming, share: float) -> float:
    """The least seconds of computation between exchanges for which the smallest share is at most `share`.

    `share` is greater than 0 and at most 1, and refers to the first result of `waiting`.
    """
    if exchange.mode in ("round_robin", "sync"):
        return exchange.seconds * (1 - share) / share
    return max(exchange.alone * (1 - share) / share, exchange.seconds * (1 - share))


def hidden(exchange: ElasticTiming, compute: float, step: float) -> float:
    """The share of time that a worker waits if an exchange overlaps with one step.

    Args:
        exchange: The exchange.
        compute: Seconds of computation between two exchanges.
        step: Seconds of the step.
    """
    exposed = max(0.0, exchange.seconds - step)
    return exposed / (exposed + compute) if exposed else 0.0
