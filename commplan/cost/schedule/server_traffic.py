"""Predicts the traffic of a plan with its servers, and compares elastic modes."""

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
    """One op that communicates with servers, in time and bytes. Messages and bytes are per worker.

    Attributes:
        phase, line, kind, mode, staleness: The op.
        server, workers, servers: The server axis, and the numbers of workers and servers.
        places: The places of the servers.
        period: The number of steps between two requests.
        distributions: The distribution of each state over the servers.
        messages_up, messages_down, nbytes_up, nbytes_down: The traffic of one worker.
        seconds: Until the last of all workers, which send at the same time, is answered; for a `put` until
            its messages have arrived.
        alone: The same for a single worker.
        bound: A lower bound of `seconds`.
        busy: Seconds of the busiest server's processor.
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
    """One elastic exchange in one mode.

    Attributes:
        mode: The mode.
        seconds: The time if all workers exchange at once.
        alone: The time of a single worker; the same as `seconds` for `sync`.
        way: A description of the implementation.
    """

    mode: ElasticMode
    seconds: float
    alone: float
    way: str


def server_timing(
    site: Site, sites: Sites, predictor: Predictor, period: int
) -> tuple[ServerTiming, CollectiveTime]:
    """Predict the op of `site`. `period` is the number of steps between two requests."""
    traffic, network = request_traffic(site, sites), predictor.network
    places = predictor.servers[site.first : site.first + site.servers]
    joint = request_cost(traffic, predictor.workers, places, network)
    single = cost_alone(traffic, predictor.workers, places, network)
    timing = assemble(
        ServerTiming, site, joint,
        line=site.span.line, mode=site.mode or "", workers=sites.workers, period=period,
        places=tuple(map(int, places)), alone=single.seconds,
        messages_up=int(traffic.sent.sum()), messages_down=int(traffic.got.sum()),
        nbytes_up=int(traffic.up.sum()), nbytes_down=int(traffic.down.sum()),
    )  # fmt: skip
    return timing, joint.prediction(network)


def elastic_modes(
    predictor: Predictor, over: tuple[str, ...], nbytes: float, servers: int = 1
) -> tuple[ElasticTiming, ...]:
    """Every mode of elastic averaging of `nbytes`.

    Centers are on `servers` servers; `sync` uses the fastest flat all-reduce.
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
    """Every mode for the average of `op`, on as many servers as its center has, or on one."""
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
    """The time of an exchange without servers, with the states sharded over the workers or replicated."""
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
    """The smallest and largest share of time that a worker communicates.

    Between two exchanges there are `compute` seconds of computation. Workers that use a server one after the
    other spread over time, until it is free for each of them, or never idle. If all of them arrive at once,
    each waits for all. In `round_robin` and `sync` each always waits for all.
    """
    maximum = exchange.seconds / (exchange.seconds + compute)
    if exchange.mode in ("round_robin", "sync"):
        return maximum, maximum
    period = max(compute + exchange.alone, exchange.seconds)
    return min(maximum, 1 - compute / period), maximum


def least_compute(exchange: ElasticTiming, share: float) -> float:
    """Seconds of computation between exchanges so that communication takes at most `share` of the time."""
    if exchange.mode in ("round_robin", "sync"):
        return exchange.seconds * (1 - share) / share
    return max(exchange.alone * (1 - share) / share, exchange.seconds * (1 - share))


def hidden(exchange: ElasticTiming, compute: float, step: float) -> float:
    """The share of time that communication takes if an exchange overlaps with one step of `step` seconds."""
    exposed = max(0.0, exchange.seconds - step)
    return exposed / (exposed + compute) if exposed else 0.0
