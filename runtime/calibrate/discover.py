"""Find racks, the groups of hosts that share a link, from the bandwidth between pairs of hosts.

Each pair of hosts is measured twice: alone, and while all other hosts exchange in pairs, too. The pairs are
those of round-robin tournaments, so a host is in one pair at a time and pairs share no host's link. Two pairs
that cross the same uplink share it, and each gets less than a pair within a rack.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from commplan.diagnostics import fail
from commplan.runtime.calibrate.calibrate import Fabric, Pairs, measured_level, pairs_of_levels
from commplan.topology import Level, Topology, natural_order, places_of_hosts

# The number of tournaments, each with another order of hosts, so that no pair always crosses an uplink alone.
TOURNAMENTS = 3
# The most passes over all hosts. In a pass each host joins the rack with the largest share of fast links.
PASSES = 5
# With more hosts than this, only one pair of each round is measured alone, and no table is printed.
ALONE = 16
# The least ratio of bandwidths within a rack and across racks.
SHARED = 1.4
# Seconds of an exchange that hides latencies.
LONG_S = 0.05
# Bytes of the first exchange. Its size grows until an exchange takes `LONG_S`.
LEAST = 2**16
# The number of exchanges of each pair. The best one counts.
RUNS = 2

HostPairs = Sequence[tuple[int, int]]  # Indices of hosts.


class PairFabric(Fabric, Protocol):
    """A fabric that times pairs one by one."""

    def timed(self, pairs: Pairs, nbytes: int, runs: int) -> list[float]:
        """Time exchanges of `nbytes` in each direction, of all pairs at once.

        Returns the seconds of the shortest of `runs` exchanges, for each pair.
        """
        ...


class Discovery(NamedTuple):
    """The measurements between hosts, and the topology that explains them.

    Attributes:
        hosts: The names of the hosts, in natural order.
        alone: The rate of each pair without other pairs, f64[host, host], in bytes per second in each
            direction; NaN if not measured.
        shared: The least rate of each pair with other pairs, as `alone`.
        racks: The indices of the hosts of each rack; one rack if all pairs are similar.
        topology: The topology with measured latencies and bandwidths.
    """

    hosts: tuple[str, ...]
    alone: np.ndarray
    shared: np.ndarray
    racks: tuple[tuple[int, ...], ...]
    topology: Topology

    def lines(self) -> list[str]:
        """The table of pairs and the racks, as text."""
        lines = ["MB/s between two hosts, alone / while all hosts exchange in pairs"]
        order = [host for rack in self.racks for host in rack]
        width = max(9, *(len(name) for name in self.hosts)) + 2
        if len(order) <= ALONE:
            lines.append("".join(f"{name:>{width}}" for name in ("", *(self.hosts[host] for host in order))))
            for host in order:
                cells = [self._cell(host, other) for other in order]
                lines.append("".join(f"{cell:>{width}}" for cell in (self.hosts[host], *cells)))
        for number, rack in enumerate(self.racks, 1):
            label = f"rack {number}" if len(self.racks) > 1 else "one rack"
            lines.append(f"{label}: {', '.join(self.hosts[host] for host in rack)}")
        for level in self.topology.levels:
            rate, latency = level.bandwidth / 1e6, level.latency * 1e6
            lines.append(f"level {level.name}: {level.count} x {rate:.1f} MB/s, {latency:.1f} us")
        return lines

    def _cell(self, host: int, other: int) -> str:
        """The rates of a pair, such as "940.1/470.2"; a dot for a rate that was not measured."""
        if host == other:
            return "-"
        rates = (self.alone[host, other], self.shared[host, other])
        return "/".join("." if np.isnan(rate) else f"{rate / 1e6:.1f}" for rate in rates)


def discover(fabric: PairFabric, name: str) -> Discovery:
    """Measure the pairs of hosts, find racks, and measure the levels of the machine.

    Every process calls this.

    Args:
        fabric: The ranks.
        name: The name of the topology.

    Returns:
        The measurements and the topology.

    Raises:
        CommplanError: CP0759 for one host, and for hosts with different numbers of ranks.
    """
    hosts = tuple(sorted(set(fabric.hosts), key=natural_order))
    ranks = {
        host: [rank for rank, rank_host in enumerate(fabric.hosts) if rank_host == host] for host in hosts
    }
    if len(hosts) < 2 or len({len(host_ranks) for host_ranks in ranks.values()}) > 1:
        counts = ", ".join(f"{host} {len(host_ranks)}" for host, host_ranks in ranks.items())
        fail(
            "CP0759",
            f"discovery needs several hosts with the same number of ranks, but the ranks are: {counts}",
            "start one rank on each host: mpirun --map-by ppr:1:node commplan calibrate --discover -o OUT",
        )
    meter = _Meter(fabric, [ranks[host] for host in hosts])
    alone = np.full((len(hosts),) * 2, np.nan)
    shared = np.full((len(hosts),) * 2, np.nan)
    for pairs in tournament(range(len(hosts))):
        for pair in pairs if len(hosts) <= ALONE else pairs[:1]:
            _note(alone, [pair], meter.rates([pair]))
    for seed in range(TOURNAMENTS):
        order = list(range(len(hosts)))
        random.Random(seed).shuffle(order)
        for pairs in tournament(order):
            _note(shared, pairs, meter.rates(pairs))
    racks = racks_of(shared)
    return Discovery(hosts, alone, shared, racks, _topology(fabric, name, hosts, racks, meter.width))


def tournament(hosts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs in which every host meets every other host once, by the circle method.

    Each host is in one pair of each round; with an odd number of hosts one of them pauses.
    """
    circle: list[int | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def racks_of(rates: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Groups of hosts with fast links between most of their members, or one group if all pairs are similar.

    Args:
        rates: Bytes per second, f64[host, host], symmetric; the diagonal is not used. Pairs above the widest
            gap between rates are fast, if that gap is at least a factor of `SHARED`.

    Returns:
        The indices of the hosts of each group, in increasing order; the groups by their first hosts.
    """
    count = len(rates)
    ordered = np.sort(rates[np.triu_indices(count, 1)])
    gaps = ordered[1:] / ordered[:-1]
    if not len(gaps) or gaps.max() < SHARED:
        return (tuple(range(count)),)
    fast = rates >= ordered[int(gaps.argmax()) + 1]
    rack = np.arange(count)  # The number of each host's rack. At first every host is alone.
    for _ in range(PASSES):
        before = rack.copy()
        for host in range(count):
            groups = [
                np.flatnonzero((rack == number) & (np.arange(count) != host)) for number in set(rack.tolist())
            ]
            # The largest share of fast links, and of equal ones the rack with the first host.
            shares = [(float(fast[host, group].mean()), -int(group[0])) for group in groups if len(group)]
            share, negative_first = max(shares)
            if share > 0.5:
                rack[host] = rack[-negative_first]
        if np.array_equal(rack, before):
            break
    return tuple(tuple(np.flatnonzero(rack == number).tolist()) for number in dict.fromkeys(rack.tolist()))


class _Meter:
    """Measures exchanges between hosts. Each rank of a host exchanges with a rank of the other host.

    Attributes:
        fabric: The ranks.
        ranks: The ranks of each host, equally many.
        width: The number of ranks of a host.
        nbytes: The bytes of an exchange of two ranks in each direction. The first two hosts determine it.
    """

    def __init__(self, fabric: PairFabric, ranks: Sequence[Sequence[int]]) -> None:
        self.fabric, self.ranks = fabric, ranks
        self.width = len(ranks[0])
        self.nbytes = LEAST
        while self.nbytes < fabric.longest:
            seconds = fabric.slowest(max(self._times([(0, 1)])))
            if seconds >= LONG_S:
                break
            self.nbytes *= 4 if seconds < LONG_S / 4 else 2

    def rates(self, pairs: HostPairs) -> list[float]:
        """The bytes per second in each direction between the hosts of each pair, all pairs at once."""
        return [self.width * self.nbytes / max(seconds, 1e-9) for seconds in self._times(pairs)]

    def _times(self, pairs: HostPairs) -> list[float]:
        """The seconds of each pair of hosts: those of its slowest ranks."""
        between = [both for a, b in pairs for both in zip(self.ranks[a], self.ranks[b], strict=True)]
        times = self.fabric.timed(between, self.nbytes, RUNS)
        return [max(times[begin : begin + self.width]) for begin in range(0, len(times), self.width)]


def _note(rates: np.ndarray, pairs: HostPairs, measured: Sequence[float]) -> None:
    """Update the matrix `rates` of the least rates so far with `measured`, a rate for each pair."""
    for (a, b), rate in zip(pairs, measured, strict=True):
        rates[a, b] = rates[b, a] = np.fmin(rates[a, b], rate)


def _topology(
    fabric: PairFabric, name: str, hosts: Sequence[str], racks: Sequence[Sequence[int]], width: int
) -> Topology:
    """Measure the latency and bandwidth of each level.

    Args:
        fabric: The ranks.
        name: The name of the topology.
        hosts: The names of the hosts.
        racks: The indices of the hosts of each rack. Smaller racks are filled with places without hosts.
        width: The number of ranks of a host.
    """
    most = max(map(len, racks))
    names: list[str] = []
    for number, rack in enumerate(racks, 1):
        names += [hosts[host] for host in rack]
        names += [f"none-{number}-{index}" for index in range(len(rack) + 1, most + 1)]
    counts = {"process": width, "host": most, "rack": len(racks)}
    # The costs are guesses, which measured ones replace below.
    levels = tuple(Level(level, count, 1e-6, 1e9) for level, count in counts.items() if count > 1)
    topology = Topology(name, levels, None, tuple(names))
    spans = pairs_of_levels(topology, places_of_hosts(topology, fabric.hosts))
    costs = {level: measured_level(fabric, level, pairs, count, 0.0, 0.0) for level, pairs, count in spans}
    return replace(
        topology,
        levels=tuple(
            replace(level, latency=costs[level.name].latency, bandwidth=costs[level.name].bandwidth)
            for level in levels
        ),
    )
