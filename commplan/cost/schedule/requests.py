"""The cost of requests to servers: bytes between workers and servers, loads of links, and times.

All workers send at the same time. Each worker sends the units of a state to their owners, and receives
answers from them. Links are full duplex and shared, so the time of a stage is that of its busiest link. Units
are pipelined: while the servers receive one, they process the one before and send the answer to the one
before that. Let a, b and c be the times of the pushes, the servers' work and the pulls of u units, j the time
of the busiest link with the traffic of both directions, and m the time that one worker needs for all of its
messages. Then

    seconds = 2 latency + call + L + max(0, a + b + c - L) / u    with    L = max(a, b, c, j, m)

The last term is the time to fill and drain the pipeline, in which one unit passes the stages that are not the
slowest. It is 0 if the messages of one worker take longer than a + b + c. Without an answer there is one
latency. With `staleness`, an answer does not depend on its request, and the last term is 0.

A server handles one message after another, which takes a call, and gamma per byte that is added. The bound is
the latencies and the time of the busiest link if the state is divided evenly and both directions are used at
the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import Ints
from commplan.cost.collective.cost import CollectiveTime
from commplan.cost.network.network import Floats, Network
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis
from commplan.protocol.sites import Buffer, Site, Sites

# By kind of site: the passes of a server over the received bytes. An exchange is a sum; an elastic average is
# a difference, a product and a sum. Other kinds only store or read them.
PASSES = {"exchange": 1, "elastic": 3}


class RequestTraffic(NamedTuple):
    """The traffic of one worker with each server.

    Attributes:
        up: Bytes that the worker sends to each server; [servers].
        down: Bytes that it receives from each server; [servers].
        messages_up: The number of messages to each server; [servers].
        messages_down: The number of messages from each server; [servers].
        units: The number of units on the server with most of them; 0 if the state has none.
        senders: The numbers of the workers that send `up`; None for all.
        passes: The number of passes of a server over the received bytes.
        updated: Bytes of state that each server updates for the requests of all workers; [servers].
        stale: Whether answers do not depend on their request.
        answered: Whether there is an answer.
    """

    up: Floats
    down: Floats
    messages_up: Floats
    messages_down: Floats
    units: int
    senders: tuple[int, ...] | None
    passes: int
    updated: Floats
    stale: bool = False
    answered: bool = True


def places_of_servers(network: Network, axes: Sequence[Axis], workers: Ints) -> Ints:
    """The place of each server [servers], in the order of declaration.

    Servers take the free places after the workers, then other free places. The servers of a declaration that
    is mapped to a level are distributed over its members, and share the last place of a member without free
    places. Other servers without a free place share the last places of the machine, one each.

    Args:
        network: The network.
        axes: All axes of a schedule. Those that do not declare servers are ignored.
        workers: The places of the workers.
    """
    occupied: set[int] = set(workers.tolist())
    last = int(workers.max(initial=0))

    def free(begin: int, end: int) -> Iterator[int]:
        """The free places in this range, those after the workers first."""
        ranges = range(max(begin, last), end), range(begin, min(end, last))
        return (place for place in itertools.chain(*ranges) if place not in occupied)

    of_members: dict[tuple[int, int], Iterator[int]] = {}  # by range of places: its free places
    places: list[int] = []
    crowded: list[int] = []  # servers for which no place of the machine is free
    for axis in (axis for axis in axes if axis.kind is AxisKind.SERVER):
        index = next(
            (i for i, level in enumerate(network.levels) if axis.levels and level.name == axis.level), None
        )
        for number in range(axis.size):
            stride = network.places if index is None else network.strides[index]
            member = number % (network.places // stride)
            bounds = member * stride, (member + 1) * stride
            place = next(of_members.setdefault(bounds, free(*bounds)), None)
            if place is not None:
                places.append(place)
                occupied.add(place)
            elif index is not None:
                places.append((member + 1) * stride - 1)
            else:
                crowded.append(len(places))
                places.append(-1)
    for number, index in enumerate(crowded):
        places[index] = (network.places - len(crowded) + number) % network.places
    return np.array(places, np.int64)


def request_traffic(site: Site, sites: Sites) -> RequestTraffic:
    """The traffic of a request of `site`, one of `sites`."""
    groups = sites.members(site)
    up, messages_up = _sums(site.up, site.servers)
    down, messages_down = _sums(site.down, site.servers)
    units = max((len(site.layout.owned(server)) for server in range(site.servers)), default=0)
    senders = tuple(members[0] for members in groups) if site.kind == "put" else None
    updated, stale = np.zeros(site.servers), False
    if site.kind == "exchange":
        updated = np.array(site.layout.loads, np.float64) * len(groups) * len(site.states)
        stale = bool(site.staleness)
    passes = PASSES.get(site.kind, 0)
    return RequestTraffic(
        up, down, messages_up, messages_down, units, senders, passes, updated, stale, bool(site.down)
    )


def elastic_load(nbytes: float, servers: int, units: int) -> RequestTraffic:
    """The traffic of an elastic exchange with a center that is divided evenly, for plans without a site.

    Args:
        nbytes: Bytes of the center.
        servers: The number of servers.
        units: The number of units, and so of messages, of each server.
    """
    share = np.full(servers, nbytes / servers)
    messages = np.full(servers, float(units))
    return RequestTraffic(share, share, messages, messages, units, None, PASSES["elastic"], np.zeros(servers))


def _sums(buffers: Sequence[Buffer], servers: int) -> tuple[Floats, Floats]:
    """The bytes and the messages of each server; [servers] each."""
    nbytes, count = np.zeros(servers), np.zeros(servers)
    for buffer in buffers:
        for chunk in buffer.chunks:
            nbytes[chunk.server] += chunk.size * buffer.dtype.nbytes
            count[chunk.server] += 1
    return nbytes, count


class Cost(NamedTuple):
    """The cost of a request.

    Attributes:
        seconds: The time until the last worker has its answer or, without an answer, the servers have the
            messages.
        bound: A lower bound of `seconds`.
        busy: Seconds of the busiest server's processor.
        limit: A description of the bottleneck.
        loads: Bytes on the busiest link of each level in one direction; [levels].
    """

    seconds: float
    bound: float
    busy: float
    limit: str
    loads: Floats

    def prediction(self, network: Network) -> CollectiveTime:
        """The cost as a `CollectiveTime`, without `busy` and `limit`."""
        source = "model" + (", links measured" if network.measured else "")
        return CollectiveTime.from_load(self.seconds, self.loads, self.bound, network, source)


def request_cost(traffic: RequestTraffic, workers: Ints, servers: Ints, network: Network) -> Cost:
    """The cost of a request of all workers at the same time. The module has the formula.

    Args:
        traffic: The traffic of one worker.
        workers: The place of each worker.
        servers: The place of each server of the site.
        network: The network.
    """
    senders = workers if traffic.senders is None else workers[list(traffic.senders)]
    members = _members(network, workers, servers)
    push, pull = _traffic(network, members, senders, workers, servers, traffic.up, traffic.down)
    joint = np.array([_busiest(*loads) for loads in zip(push, pull, strict=True)])

    # The names of the formula: seconds of the pushes, the pulls, both together on their links, the busiest
    # server, and the messages of one worker.
    a = float((np.array([_busiest(pair) for pair in push]) / network.bandwidths).max())
    c = float((np.array([_busiest(pair) for pair in pull]) / network.bandwidths).max())
    j = float((joint / network.bandwidths).max())
    messages = len(senders) * traffic.messages_up + len(workers) * traffic.messages_down
    work = (len(senders) * traffic.up * traffic.passes + traffic.updated) * network.gamma
    b = float((messages * network.call + work).max(initial=0.0))
    m = float(traffic.messages_up.sum() + traffic.messages_down.sum()) * network.overhead

    latency = _latency(network, workers, servers) * (2 if traffic.answered else 1)
    units = max(1, traffic.units)
    longest = max(a, b, c, j, m)
    fill_drain = 0.0 if traffic.stale else max(0.0, a + b + c - longest) / units
    bound = _bound(traffic, senders, workers, servers, network) + latency
    limit = f"links of level {network.levels[int((joint / network.bandwidths).argmax())].name}"
    if longest > j:
        limit = "the servers' processors" if longest == b else "messages of a worker"
    seconds = latency + network.call + longest + fill_drain
    return Cost(seconds, min(bound, seconds), b, limit, joint)


def cost_alone(traffic: RequestTraffic, workers: Ints, servers: Ints, network: Network) -> Cost:
    """The cost of a request of the most distant worker, while no other worker sends.

    The arguments are those of `request_cost`.
    """
    distance = np.zeros(len(workers))
    for index, level in enumerate(network.levels):
        worker_units = network.units(workers, index)
        server_units = np.unique(network.units(servers, index))
        is_remote = (worker_units[:, None] != server_units[None, :]).any(axis=1)
        distance[is_remote] = np.maximum(distance[is_remote], level.latency)
    farthest = int(distance.argmax())
    return request_cost(traffic._replace(senders=None), workers[farthest : farthest + 1], servers, network)


# Bytes on the up and on the down link of each member of a level; [members] each.
LinkLoads = tuple[Floats, Floats]


def link_bytes(traffic: RequestTraffic, workers: Ints, servers: Ints, network: Network) -> list[LinkLoads]:
    """The bytes of a request of all workers, including the answer, on the links of each level.

    The arguments are those of `request_cost`. Levels are innermost first.
    """
    senders = workers if traffic.senders is None else workers[list(traffic.senders)]
    members = [np.arange(network.places // stride) for stride in network.strides]
    directions = zip(
        *_traffic(network, members, senders, workers, servers, traffic.up, traffic.down), strict=True
    )
    return [(push[0] + pull[0], push[1] + pull[1]) for push, pull in directions]


def _members(network: Network, workers: Ints, servers: Ints) -> list[Ints]:
    """The members of each level that contain a worker or a server, in ascending order.

    The loads of the others are 0, and there may be millions of them.
    """
    occupied = np.concatenate([workers, servers])
    return [np.unique(network.units(occupied, level)) for level in range(len(network.levels))]


def _traffic(
    network: Network, members: Sequence[Ints], senders: Ints, workers: Ints, servers: Ints, up: Floats,
    down: Floats,
) -> tuple[list[LinkLoads], list[LinkLoads]]:  # fmt: skip
    """The loads of pushes and pulls on the links of `members`, by level. `up` and `down` are per server."""
    pushed = np.broadcast_to(up[None, :], (len(senders), len(servers)))
    pulled = np.broadcast_to(down[:, None], (len(servers), len(workers)))
    return _links(network, members, senders, servers, pushed), _links(
        network, members, servers, workers, pulled
    )


def _links(
    network: Network, members: Sequence[Ints], sources: Ints, sinks: Ints, nbytes: Floats
) -> list[LinkLoads]:
    """The loads of transfers of `nbytes` [sources, sinks] on the links of `members`, by level."""
    links: list[LinkLoads] = []
    for level, units in enumerate(members):
        source, sink = network.units(sources, level), network.units(sinks, level)
        moved = np.where(source[:, None] != sink[None, :], nbytes, 0.0)
        up: Floats = np.zeros(len(units))
        down: Floats = np.zeros(len(units))
        np.add.at(up, np.searchsorted(units, source), moved.sum(axis=1))
        np.add.at(down, np.searchsorted(units, sink), moved.sum(axis=0))
        links.append((up, down))
    return links


def _busiest(*loads: LinkLoads) -> float:
    """Bytes on the busiest link with the sum of these loads, which are of one level."""
    up, down = sum((load[0] for load in loads), np.zeros(1)), sum((load[1] for load in loads), np.zeros(1))
    return float(max(up.max(), down.max()))


def _latency(network: Network, workers: Ints, servers: Ints) -> float:
    """The largest latency of the levels between any workers and servers; 0 if all are at one place."""
    occupied = np.concatenate([workers, servers])
    crossed = [
        level.latency
        for index, level in enumerate(network.levels)
        if len(np.unique(network.units(occupied, index))) > 1
    ]
    return max(crossed, default=0.0)


def _bound(traffic: RequestTraffic, senders: Ints, workers: Ints, servers: Ints, network: Network) -> float:
    """A lower bound in seconds from the bytes, with the state divided evenly among the servers."""
    up, down = (np.full(len(servers), total.sum() / len(servers)) for total in (traffic.up, traffic.down))
    members = _members(network, workers, servers)
    push, pull = _traffic(network, members, senders, workers, servers, up, down)
    joint = [_busiest(*loads) for loads in zip(push, pull, strict=True)]
    return max(nbytes / level.bandwidth for nbytes, level in zip(joint, network.levels, strict=True))
