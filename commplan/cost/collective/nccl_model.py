"""NCCL's estimates for each algorithm and protocol of a collective.

Algorithms are ring, tree, NVLS, NVLS tree and PAT; protocols are LL, LL128 and Simple. NCCL estimates a
latency and a bandwidth for each combination and selects the fastest. `choices` computes the same two numbers.

Sources: NVIDIA/nccl 2.30.7, `src/graph/tuning.cc` (latencies, bandwidths of channels, their combination, the
correction of trees), `src/graph/search.cc` (speeds of channels) and `src/transport/nvls.cc` (chunks of NVLS).

NCCL only ranks the combinations, while this model predicts times. It differs in these points:

- Pipelines are filled before they run: NVLS by one chunk of each channel, trees by one for each further
  level.
- A broadcast and a reduce have the latency of a ring's steps.
- The correction of trees is interpolated between sizes, so that a larger message is never faster.

CollNet (sums in the network) is not modeled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from commplan.ir.collective_kinds import BLOCKED, ROOTED

# The order of protocols in the tables below.
PROTOCOLS = ("ll", "ll128", "simple")
NVLS_EFFICIENCY = 0.85  # fraction of the speed of a head that NVLS reaches
NVLS_CHUNK = 16 * 128 * 1024  # bytes per head: 16 channels with chunks of 128 KiB
TREE_CHUNK = 512 * 1024  # bytes per channel

# Microseconds by algorithm, then by protocol.
_START = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK_HOP = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NETWORK_HOP = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_POST = (1.0, 1.0, 3.0)  # posting to the network card, in each step of a ring between nodes
# Microseconds.
_NVLS_HOP = 25.0  # inside a node
_NVLS_NETWORK_HOP = 20.9  # between nodes
_PAT_START = 8.0
_PAT_RANK = 2.8  # per rank
# Factors.
_PAT_OVERLAP = 3.5  # divides the latency of the hops of PAT, which overlap
_PLATEAU = 1.4  # multiplies the latency of rings that send whole chunks between nodes
_LL128_TREE_INSIDE = 7 / 9  # fraction of a tree's bandwidth that LL128 reaches inside a node
_LL128_TREE_BETWEEN = 120 / 128  # the same between nodes: 120 of 128 bytes of a line are data
_LL_TREE = 3.8  # divides the bandwidth of a tree for LL
_BUS_EFFICIENCY = 0.92  # fraction of the bandwidth that trees, and rings with LL128, reach
_PAT_EFFICIENCY = 0.75  # the same for PAT

_LL_BETWEEN = (39.0, 39.0, 20.4)  # GB/s of LL on 1, 2 and more nodes

# The fraction of its bandwidth that a tree reaches, by protocol, for sizes from 64 bytes in powers of two.
_TREE = {
    "ll": "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1 1",
    "ll128": "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1 1",
    "simple": ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9 1",
}
_TREE_CORRECTION = {name: tuple(map(float, row.split())) for name, row in _TREE.items()}
_SIZES = tuple(range(24))  # base-2 logarithms of the sizes in units of 64 bytes


class Gpu(NamedTuple):
    """The maximum rates of a kind of GPU, in GB/s.

    Triples are for groups on 1, on 2 and on more nodes.

    Attributes:
        ll: All channels with protocol LL, inside a node.
        ring_ll128: One channel of a ring with LL128.
        tree: One channel of a tree with any protocol.
        tree_ll128: One channel of a tree with LL128.
        nvls_tree: One head of an NVLS tree; zeros for GPUs without NVLS.
        nvls: The possible speeds of a head of NVLS, in descending order; empty for GPUs without NVLS.
    """

    ll: float
    ring_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    nvls_tree: tuple[float, float, float] = (0.0, 0.0, 0.0)
    nvls: tuple[float, ...] = ()


_HOPPER = Gpu(
    141.0, (36.7, 36.7, 36.7), (38.7, 41.4, 36.0), (36.7, 36.7, 29.0), (0.0, 57.7, 45.5),
    (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
)  # fmt: skip
_AMPERE = Gpu(87.7, (20.0, 20.0, 20.0), (24.0, 23.6, 17.8), (20.0, 20.0, 20.0))
# By the name of the device in a topology, one of `commplan.topology.DEVICES`.
GPUS = {"a100": _AMPERE, "h100": _HOPPER, "h200": _HOPPER}


class NcclGroup(NamedTuple):
    """The ranks of a collective, equally many on each node.

    Attributes:
        gpu: The kind of GPU.
        ranks: The number of ranks.
        nodes: The number of nodes.
        inside: GB/s of a rank over NVLink; infinite if a node has a single place.
        between: GB/s of all ranks of a node together over the network; infinite on one node.
        delay: Microseconds that a message between nodes takes longer than over InfiniBand; at least 0.
    """

    gpu: Gpu
    ranks: int
    nodes: int
    inside: float
    between: float
    delay: float

    @property
    def per_node(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.nodes

    @property
    def column(self) -> int:
        """The index into constants for 1, 2 and more nodes."""
        return min(self.nodes, 3) - 1

    @property
    def channels(self) -> int:
        """The number of channels of rings and trees that NCCL's search finds.

        12 on a single node. Between nodes one per rank of a node, since each has a network card, but at
        least 2. NCCL then makes two of each (`src/graph/connect.cc`): `2 * channels` divide a buffer.
        """
        return 12 if self.nodes == 1 else max(2, self.per_node)

    @property
    def ring(self) -> float:
        """GB/s of all channels of a ring."""
        return self.inside if self.nodes == 1 else min(self.inside, self.between)

    def hop(self, latency: float, protocol: str) -> float:
        """Microseconds of a hop between nodes, which takes `latency` over InfiniBand.

        With Simple the receiver also waits for a flag, which is a second message.
        """
        return latency + self.delay * (2 if protocol == "simple" else 1)


class NcclChoice(NamedTuple):
    """The estimate for one algorithm and protocol, at one size of the buffer.

    Attributes:
        algorithm: `ring`, `tree`, `nvls`, `nvls_tree` or `pat`.
        protocol: One of `PROTOCOLS`.
        latency: Seconds.
        bandwidth: Bytes of the whole buffer per second.
        fill: Bytes that fill the pipeline first; 0 if it needs no filling.
    """

    algorithm: str
    protocol: str
    latency: float
    bandwidth: float
    fill: float

    def seconds(self, nbytes: float) -> float:
        """The time of a buffer of `nbytes`, which should be near the size of the estimate."""
        return self.latency + (nbytes + self.fill) / self.bandwidth


def choices(kind: str, nbytes: float, group: NcclGroup) -> Iterator[NcclChoice]:
    """Yield an estimate for each algorithm and protocol that NCCL has for the collective.

    Args:
        kind: One of `commplan.cost.collective.nccl.COLLECTIVES`.
        nbytes: Bytes of the whole buffer, as in `CollectiveQuery`.
        group: The ranks, at least two.
    """
    for index, protocol in enumerate(PROTOCOLS):
        yield _ring(kind, nbytes, group, protocol, index)
        if kind == "all_reduce":
            yield _tree(nbytes, group, protocol, index)
    scattered = kind in BLOCKED
    if scattered and group.per_node == 1:
        yield _pat(group)
    if group.gpu.nvls and group.per_node > 1:
        if group.nodes == 1 and (scattered or kind == "all_reduce"):
            yield _nvls(kind, nbytes, group)
        elif kind == "all_reduce":
            yield _nvls_tree(nbytes, group)


def _choice(algorithm: str, protocol: str, latency: float, rate: float, fill: float = 0.0) -> NcclChoice:
    """Create a choice from microseconds, and GB/s of the whole buffer."""
    return NcclChoice(algorithm, protocol, latency * 1e-6, rate * 1e9, fill)


def _ring(kind: str, nbytes: float, group: NcclGroup, protocol: str, index: int) -> NcclChoice:
    """A ring with `protocol`, whose position in `PROTOCOLS` is `index`."""
    ranks, nodes, bus = group.ranks, group.nodes, group.ring
    if protocol == "ll":
        bus = min(group.gpu.ll if nodes == 1 else _LL_BETWEEN[group.column], bus / 2)
    elif protocol == "ll128":
        bus = min(_BUS_EFFICIENCY * bus, group.channels * group.gpu.ring_ll128[group.column])
    passes = 2 if kind == "all_reduce" else 1
    steps, crossing = passes * (ranks - 1), passes * (nodes - 1)
    inside = _NVLINK_HOP["ring"][index] if nodes == 1 else max(_NVLINK_HOP["ring"][index], _POST[index])
    # With one rank per node nothing hides the latency of the network.
    between = _NETWORK_HOP["tree" if group.per_node == 1 else "ring"][index]
    latency = _START["ring"][index] + (steps - crossing) * inside + crossing * group.hop(between, protocol)
    has_whole_chunks = nbytes >= 64 * 2 * group.channels * ranks  # NCCL's own condition
    if protocol == "simple" and kind == "all_reduce" and nodes > 1 and has_whole_chunks:
        latency *= _PLATEAU
    share = 1.0 if kind in ROOTED else steps / ranks
    return _choice("ring", protocol, latency, bus / share)


def _tree(nbytes: float, group: NcclGroup, protocol: str, index: int) -> NcclChoice:
    """A chain inside each node and two trees between nodes, each for half of the buffer.

    The position of `protocol` in `PROTOCOLS` is `index`.
    """
    nodes, gpu, column = group.nodes, group.gpu, group.column
    # On two nodes a byte crosses the network once and NVLink twice.
    bus = min(group.inside, 2 * group.between) if nodes == 2 else group.ring
    bus = min(_BUS_EFFICIENCY * bus, group.channels * gpu.tree[column])
    if protocol == "ll":
        bus = min(bus / _LL_TREE, gpu.ll if nodes == 1 else _LL_BETWEEN[column])
    elif protocol == "ll128":
        fraction = _LL128_TREE_INSIDE if nodes == 1 else _LL128_TREE_BETWEEN
        bus = min(bus * fraction, group.channels * gpu.tree_ll128[column])
    levels = int(math.log2(nodes))
    between = levels * group.hop(_NETWORK_HOP["tree"][index], protocol)
    latency = _START["tree"][index] + 2 * ((group.per_node - 1) * _NVLINK_HOP["tree"][index] + between)
    size = math.log2(max(nbytes, 1.0) / 64)
    rate = bus / 2 * float(np.interp(size, _SIZES, _TREE_CORRECTION[protocol]))
    fill = max(0, levels - 1) * min(nbytes, 2 * group.channels * TREE_CHUNK)
    return _choice("tree", protocol, latency, rate, fill)


def _pat(group: NcclGroup) -> NcclChoice:
    """Parallel aggregated trees of one rank per node."""
    hops = int(math.log2(group.nodes)) * group.hop(_NETWORK_HOP["tree"][2], "simple") / _PAT_OVERLAP
    rate = _PAT_EFFICIENCY * group.ring
    return _choice("pat", "simple", _PAT_START + hops + _PAT_RANK * group.ranks, rate)


def _nvls(kind: str, nbytes: float, group: NcclGroup) -> NcclChoice:
    """Sums and multicasts in the switch of a single node."""
    ranks = group.ranks
    share = ranks / (ranks - 1) if kind == "all_reduce" else (ranks - 1) / ranks
    return _choice("nvls", "simple", _NVLS_HOP, ranks * _head(group) * share, _nvls_fill(nbytes, group))


def _nvls_tree(nbytes: float, group: NcclGroup) -> NcclChoice:
    """An all-reduce that adds in the switch of each node, with two trees between the nodes."""
    nodes, heads, ranks = group.nodes, group.per_node, group.ranks
    network = group.between / heads * (2 if nodes == 2 else 1)
    bus = heads * min(2 * _head(group), network, group.gpu.nvls_tree[group.column])
    latency = _NVLS_HOP + 2 * int(math.log2(nodes)) * group.hop(_NVLS_NETWORK_HOP, "simple")
    return _choice("nvls_tree", "simple", latency, bus * ranks / (2 * (ranks - 1)), _nvls_fill(nbytes, group))


def _head(group: NcclGroup) -> float:
    """GB/s of one head: a rank that receives its part of the node's sums."""
    heads = group.per_node
    speeds = group.gpu.nvls
    speed = next((speed for speed in speeds if speed * heads <= group.inside), group.inside / heads)
    return speed * NVLS_EFFICIENCY * (heads - 1) / heads


def _nvls_fill(nbytes: float, group: NcclGroup) -> float:
    """Bytes of the first chunk of all channels."""
    return min(nbytes, group.per_node * NVLS_CHUNK)
