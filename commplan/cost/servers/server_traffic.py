"""What a plan says to its servers: messages, bytes and time of each op, and what elastic modes compare at."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from commplan.collectives import registry
from commplan.collectives.program import Kind
from commplan.cost.collective.cost import CollectiveTime
from commplan.cost.predictor import Predictor
from commplan.cost.servers.requests import alone, asked, cost, elastic_load, places_of_servers
from commplan.ir.assemble import assemble
from commplan.ir.plan import Algorithm, AxisKind
from commplan.ir.schedule import Axis, Elastic, Phase, Schedule
from commplan.protocol.chunks import usual
from commplan.protocol.sites import Held, Site, Sites

MODES = ("round_robin", "async", "hogwild", "sync")
Mode = Literal["round_robin", "async", "hogwild", "sync"]
SLICE = 64 * 1024  # bytes of a message where an all-reduce is cut


class ServerTiming(msgspec.Struct, frozen=True):
    """One op that talks with servers, in time and bytes.

    period: steps from one to the next. places: of the servers. Messages and bytes are those of one worker.
    seconds: until the last of all workers that ask at once is answered (of a `put`: until it has arrived);
    alone: of one that has the servers for itself; busy: of the busiest server's processor. limit: what most
    of the time goes by.
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
    held: tuple[Held, ...]
    messages_up: int
    messages_down: int
    nbytes_up: int
    nbytes_down: int
    seconds: float
    alone: float
    bound: float
    busy: float
    limit: str


class Exchanged(msgspec.Struct, frozen=True):
    """One elastic exchange in one mode. seconds: of all workers at once; alone: of one that has the server
    for itself (in `sync` there is no such thing). way: how it is carried out."""

    mode: Mode
    seconds: float
    alone: float
    way: str


def talk(site: Site, sites: Sites, predictor: Predictor, period: int) -> tuple[ServerTiming, CollectiveTime]:
    """What the op of `site` takes. period: steps from one to the next."""
    traffic, network = asked(site, sites), predictor.network
    places = predictor.servers[site.first : site.first + site.servers]
    joint = cost(traffic, predictor.workers, places, network)
    single = alone(traffic, predictor.workers, places, network)
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
) -> tuple[Exchanged, ...]:
    """Every mode of elastic averaging of `nbytes`, with a centre on `servers` servers, or for `sync` by the
    fastest flat all-reduce."""
    network, workers = predictor.network, predictor.workers
    units = max(1, math.ceil(nbytes / servers / usual(int(nbytes), servers)))
    traffic = elastic_load(nbytes, servers, units)
    places = predictor.servers[:servers]
    if len(places) < servers:  # the plan has none
        places = places_of_servers(network, (Axis("center", AxisKind.SERVER, servers),), workers)
    both = cost(traffic, workers, places, network).seconds, alone(traffic, workers, places, network).seconds
    way = f"{servers} server{'s' * (servers != 1)}"
    exchanges = [Exchanged(mode, *both, way) for mode in ("round_robin", "async", "hogwild")]
    seconds, name = _fastest(predictor, "all_reduce", over, nbytes)
    return (*exchanges, Exchanged("sync", seconds, seconds, f"all-reduce via {name}"))


def elastic_of(schedule: Schedule, phase: Phase, op: Elastic, predictor: Predictor) -> tuple[Exchanged, ...]:
    """Every mode for what `op` averages, on as many servers as its centre has, or on one."""
    values = {value.id: value for value in (*schedule.entry, *phase.values)}
    server = values[op.center].placement.server
    count = schedule.axis(server).size if server is not None else 1
    return elastic_modes(predictor, op.axes, values[op.operand].nbytes, count)


def _fastest(predictor: Predictor, kind: Kind, over: tuple[str, ...], nbytes: float) -> tuple[float, str]:
    """nbytes: of one rank's operand."""
    tried: list[tuple[float, str]] = []
    for name in ("native", *registry.algorithms(kind)):
        for chunk in (None, SLICE):
            timing = predictor.predict(kind, Algorithm(name), over, nbytes, chunk=chunk)
            if timing is not None:
                tried.append((timing.seconds, name))
    return min(tried)


def instead(predictor: Predictor, site: Site, sites: Sites) -> tuple[tuple[str, float], ...]:
    """What an exchange with servers takes without them: with owners among the workers, or without owners."""
    over = tuple(name for name, size in sites.axes if name not in site.per and size > 1)
    if site.kind != "exchange" or not over:
        return ()
    nbytes = float(sum(site.layout.loads))
    ranks = predictor.layout(over).ranks
    scatter, scatter_name = _fastest(predictor, "reduce_scatter", over, nbytes)
    gather, gather_name = _fastest(predictor, "all_gather", over, nbytes / ranks)
    both, reduce_name = _fastest(predictor, "all_reduce", over, nbytes)
    parts = f"scatter via {scatter_name}, gather via {gather_name}"
    return (
        (f"states with the workers, which own them in parts: {parts}", scatter + gather),
        (f"states with the workers, which all update them: all-reduce via {reduce_name}", both),
    )


def waiting(exchange: Exchanged, compute: float) -> tuple[float, float]:
    """The share of the time that a worker communicates, between two exchanges `compute` seconds of work: at
    least, and at most.

    Workers that meet a server one by one spread over time until each finds it free, or it is never idle;
    where all come at once, each waits for all. In `round_robin` and `sync` each always waits for all.
    """
    most = exchange.seconds / (exchange.seconds + compute)
    if exchange.mode in ("round_robin", "sync"):
        return most, most
    period = max(compute + exchange.alone, exchange.seconds)
    return min(most, 1 - compute / period), most


def least_compute(exchange: Exchanged, share: float) -> float:
    """Seconds of work between two exchanges from which on communication takes at most `share` of the time, at
    its best."""
    if exchange.mode in ("round_robin", "sync"):
        return exchange.seconds * (1 - share) / share
    return max(exchange.alone * (1 - share) / share, exchange.seconds * (1 - share))


def hidden(exchange: Exchanged, compute: float, step: float) -> float:
    """The share that is left where an exchange runs under one step of `step` seconds."""
    left = max(0.0, exchange.seconds - step)
    return left / (left + compute) if left else 0.0
