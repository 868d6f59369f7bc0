"""What talking with servers costs: who sends how many bytes to whom, on which links, and how long that takes.

All workers ask at once. Bytes go where the sites say: each worker sends the units of a state to their owners
and gets an answer from them. Links are full duplex, and shared by all who use them, so the time of a stage is
that of its busiest link. Units stream: while the servers take in one, they serve the one before and send the
answer to the one before that. With the pushes, the servers' work and the pulls of u units taking a, b and c,
and j for the busiest link with both directions of traffic on it,

    seconds = 2 latency + call + (a + b + c) / u + (1 - 1/u) max(a, b, c, j)

With `staleness` an answer waits for nothing of its own request, and the first term of the units falls away.
A server looks at one message after another, which takes a call and what is added gamma for each byte.
The bound is what the busiest link takes where the state is divided evenly, both directions at once.
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

PASSES = {"exchange": 1, "elastic": 3}  # over the bytes that arrive: a sum; a difference, a product, a sum


class RequestTraffic(NamedTuple):
    """What every worker sends to, and gets from, each server: bytes and messages [servers].

    units: of the server that has most. senders: the workers that send `up`, None for all.
    passes: over the bytes that arrive; updated: bytes of state that each server makes anew [servers]. stale:
    whether answers wait for nothing of their own request. answered: whether there is an answer.
    """

    up: Floats
    down: Floats
    sent: Floats
    got: Floats
    units: int
    senders: tuple[int, ...] | None
    passes: int
    updated: Floats
    stale: bool = False
    answered: bool = True


def places_of_servers(network: Network, axes: Sequence[Axis], workers: Ints) -> Ints:
    """The place of each server, declarations in their order.

    Servers start after the workers: they take the free places behind theirs, then other free ones. Those of a
    declaration that is mapped to a level go round its members. Where no place is free, they sit on the last.
    """
    taken: set[int] = set(workers.tolist())
    last = int(workers.max(initial=0))

    def free(begin: int, end: int) -> Iterator[int]:
        """The free ones among these places, those behind the workers first."""
        behind = range(max(begin, last), end), range(begin, min(end, last))
        return (place for place in itertools.chain(*behind) if place not in taken)

    of_members: dict[tuple[int, int], Iterator[int]] = {}
    places: list[int] = []
    crowded: list[int] = []
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
                taken.add(place)
            elif index is not None:
                places.append((member + 1) * stride - 1)
            else:
                crowded.append(len(places))
                places.append(-1)
    for number, where in enumerate(crowded):
        places[where] = (network.places - len(crowded) + number) % network.places
    return np.array(places, np.int64)


def asked(site: Site, sites: Sites) -> RequestTraffic:
    """What `site` moves."""
    groups = sites.members(site)
    up, sent = _of(site.up, site.servers)
    down, got = _of(site.down, site.servers)
    units = max((len(site.layout.owned(server)) for server in range(site.servers)), default=0)
    senders = tuple(members[0] for members in groups) if site.kind == "put" else None
    updated, stale = np.zeros(site.servers), False
    if site.kind == "exchange":
        updated = np.array(site.layout.loads, np.float64) * len(groups) * len(site.states)
        stale = bool(site.staleness)
    passes = PASSES.get(site.kind, 0)
    return RequestTraffic(up, down, sent, got, units, senders, passes, updated, stale, bool(site.down))


def elastic_load(nbytes: float, servers: int, units: int) -> RequestTraffic:
    """An elastic exchange of `nbytes` with a centre that is divided evenly, where there is no site for it."""
    each, messages = np.full(servers, nbytes / servers), np.full(servers, float(units))
    return RequestTraffic(each, each, messages, messages, units, None, PASSES["elastic"], np.zeros(servers))


def _of(buffers: Sequence[Buffer], servers: int) -> tuple[Floats, Floats]:
    nbytes, count = np.zeros(servers), np.zeros(servers)
    for buffer in buffers:
        for chunk in buffer.chunks:
            nbytes[chunk.server] += chunk.size * buffer.dtype.nbytes
            count[chunk.server] += 1
    return nbytes, count


class Cost(NamedTuple):
    """seconds, bound: as in `CollectiveTime`; busy: of the busiest server's processor; limit: in words."""

    seconds: float
    bound: float
    busy: float
    limit: str
    loads: Floats  # bytes on the busiest link of each level

    def prediction(self, network: Network) -> CollectiveTime:
        """The same as collectives tell it."""
        source = "model" + (", links as measured" if network.measured else "")
        return CollectiveTime.of(self.seconds, self.loads, self.bound, network, source)


def cost(traffic: RequestTraffic, workers: Ints, servers: Ints, network: Network) -> Cost:
    """What a request of all `workers` takes. workers, servers: their places."""
    senders = workers if traffic.senders is None else workers[list(traffic.senders)]
    members = _members(network, workers, servers)
    push, pull = _traffic(network, members, senders, workers, servers, traffic.up, traffic.down)
    joint = np.array([_most(*ways) for ways in zip(push, pull, strict=True)])
    a, c, j = (
        float((np.array([_most(pair) for pair in push]) / network.bandwidths).max()),
        float((np.array([_most(pair) for pair in pull]) / network.bandwidths).max()),
        float((joint / network.bandwidths).max()),
    )
    messages = len(senders) * traffic.sent + len(workers) * traffic.got
    work = (len(senders) * traffic.up * traffic.passes + traffic.updated) * network.gamma
    b = float((messages * network.call + work).max(initial=0.0))
    own = float(traffic.sent.sum() + traffic.got.sum()) * network.overhead
    latency = _latency(network, workers, servers) * (2 if traffic.answered else 1)
    units, most = max(1, traffic.units), max(a, b, c, j, own)
    fill = 0.0 if traffic.stale else (a + b + c - most) / units if units > 1 else a + b + c - most
    least = _least(traffic, senders, workers, servers, network) + latency
    limit = f"links of level {network.levels[int((joint / network.bandwidths).argmax())].name}"
    if most > j:
        limit = "the servers' processors" if most == b else "messages of a worker"
    seconds = latency + network.call + most + max(0.0, fill)
    return Cost(seconds, min(least, seconds), b, limit, joint)


def alone(traffic: RequestTraffic, workers: Ints, servers: Ints, network: Network) -> Cost:
    """The same of one worker, the one furthest away, while no other asks."""
    reached = np.zeros(len(workers))
    for index, level in enumerate(network.levels):
        own, others = network.units(workers, index), np.unique(network.units(servers, index))
        away = (own[:, None] != others[None, :]).any(axis=1)
        reached[away] = np.maximum(reached[away], level.latency)
    far = int(reached.argmax())
    return cost(traffic._replace(senders=None), workers[far : far + 1], servers, network)


Ways = tuple[Floats, Floats]  # bytes on the up and on the down link of each member of a level


def link_bytes(traffic: RequestTraffic, workers: Ints, servers: Ints, network: Network) -> list[Ways]:
    """What a request of all `workers`, answer included, puts on the links of each level."""
    senders = workers if traffic.senders is None else workers[list(traffic.senders)]
    members = [np.arange(network.places // stride) for stride in network.strides]
    both = zip(*_traffic(network, members, senders, workers, servers, traffic.up, traffic.down), strict=True)
    return [(push[0] + pull[0], push[1] + pull[1]) for push, pull in both]


def _members(network: Network, workers: Ints, servers: Ints) -> list[Ints]:
    """The members of each level that hold a worker or a server, in order; others may be millions."""
    everybody = np.concatenate([workers, servers])
    return [np.unique(network.units(everybody, level)) for level in range(len(network.levels))]


def _traffic(
    network: Network, members: Sequence[Ints], senders: Ints, workers: Ints, servers: Ints, up: Floats,
    down: Floats,
) -> tuple[list[Ways], list[Ways]]:  # fmt: skip
    """What pushes and pulls put on the links of `members`, by level; up, down: of one worker, by server."""
    sent = np.broadcast_to(up[None, :], (len(senders), len(servers)))
    got = np.broadcast_to(down[:, None], (len(servers), len(workers)))
    return _links(network, members, senders, servers, sent), _links(network, members, servers, workers, got)


def _links(
    network: Network, members: Sequence[Ints], sources: Ints, sinks: Ints, nbytes: Floats
) -> list[Ways]:
    """nbytes [sources, sinks]: what each sends to each."""
    links: list[Ways] = []
    for level, known in enumerate(members):
        source, sink = network.units(sources, level), network.units(sinks, level)
        moved = np.where(source[:, None] != sink[None, :], nbytes, 0.0)
        up: Floats = np.zeros(len(known))
        down: Floats = np.zeros(len(known))
        np.add.at(up, np.searchsorted(known, source), moved.sum(axis=1))
        np.add.at(down, np.searchsorted(known, sink), moved.sum(axis=0))
        links.append((up, down))
    return links


def _most(*ways: Ways) -> float:
    """Bytes on the busiest link when all of them are under way."""
    up, down = sum((way[0] for way in ways), np.zeros(1)), sum((way[1] for way in ways), np.zeros(1))
    return float(max(up.max(), down.max()))


def _latency(network: Network, workers: Ints, servers: Ints) -> float:
    """Of the longest way."""
    all_of_them = np.concatenate([workers, servers])
    crossed = [
        level.latency
        for index, level in enumerate(network.levels)
        if len(np.unique(network.units(all_of_them, index))) > 1
    ]
    return max(crossed, default=0.0)


def _least(traffic: RequestTraffic, senders: Ints, workers: Ints, servers: Ints, network: Network) -> float:
    """Seconds that the bytes take at least, with the state divided evenly among these servers."""
    up, down = (np.full(len(servers), total.sum() / len(servers)) for total in (traffic.up, traffic.down))
    members = _members(network, workers, servers)
    push, pull = _traffic(network, members, senders, workers, servers, up, down)
    joint = [_most(*ways) for ways in zip(push, pull, strict=True)]
    return max(nbytes / level.bandwidth for nbytes, level in zip(joint, network.levels, strict=True))
