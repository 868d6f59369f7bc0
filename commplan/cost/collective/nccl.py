"""Predicts `native` on NVIDIA GPUs with NVLink: NCCL's choice of algorithm, and the bytes on links.

`nccl_model` has the estimates for groups of ranks. This module derives these groups from ranks on a network.
The results are compared with published tables of nccl-tests (`tests/cost/test_nccl_tables.py`). For other
machines they are uncalibrated guesses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from commplan.collectives.program import Ints
from commplan.cost.collective.nccl_model import GPUS, NcclChoice, NcclGroup, choices
from commplan.cost.network.network import Floats, Layout, Network
from commplan.ir.collective_kinds import NATIVE_KINDS, ROOTED

COLLECTIVES = (*NATIVE_KINDS, "reduce")  # the kinds for which NCCL is modeled
# The fractions of the bandwidth on the data sheet that NCCL's channels reach.
NVLINK_REACHED = 0.8  # 20 GB/s of 25, and 360 GB/s of 450
NETWORK_REACHED = 0.96  # 24 GB/s of 25, and 48 GB/s of 50
# Seconds of the latency of a topology's level that NCCL's own latencies already include.
NETWORK_LATENCY = 6e-6


def choose(kind: str, nbytes: float, layout: Layout, network: Network) -> tuple[NcclChoice, Floats] | None:
    """The algorithm and protocol that NCCL selects, and the bytes on the busiest link of each level.

    Args:
        kind: The kind of collective.
        nbytes: Bytes of the whole buffer, as in `CollectiveQuery`.
        layout: The groups of ranks.
        network: The network.

    Returns:
        The fastest estimate, and the bytes [levels]. None if NCCL is not modeled: for a kind that is not in
        `COLLECTIVES`, a topology without GPUs of `GPUS`, a single rank, or nodes with different numbers of
        ranks.
    """
    group = _group(layout, network) if kind in COLLECTIVES else None
    if group is None:
        return None
    best = min(choices(kind, nbytes, group), key=lambda choice: choice.seconds(nbytes))
    return best, _crossings(layout, network) * _shares(kind, best.algorithm, layout, network) * nbytes


def link_loads(
    kind: str, algorithm: str, layout: Layout, network: Network
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the traffic of each level, innermost first, as multiples of the buffer's bytes.

    Args:
        kind: One of `COLLECTIVES`.
        algorithm: The `algorithm` of an `NcclChoice`.
        layout: The groups of ranks.
        network: The network.

    Yields:
        The traffic that leaves and that enters each member on its link, [members] each.
    """
    shares = _shares(kind, algorithm, layout, network)
    for (up, down), share in zip(_hops(layout, network), shares, strict=True):
        yield up * share, down * share


@lru_cache(maxsize=1024)
def _group(layout: Layout, network: Network) -> NcclGroup | None:
    """The ranks as arguments of NCCL's estimates.

    None without known GPUs, for a single rank, or if nodes have different numbers of ranks.
    """
    gpu, per_host = GPUS.get(network.topology.devices or ""), network.topology.host_places
    if gpu is None or layout.ranks == 1:
        return None
    node = np.sort(layout.groups // per_host, axis=1)
    nodes = 1 + int((node[0, 1:] != node[0, :-1]).sum())
    per_node = layout.ranks // nodes
    first, last = node[:, ::per_node], node[:, per_node - 1 :: per_node]
    is_uneven = (
        per_node * nodes != layout.ranks or (first != last).any() or (first[:, 1:] == first[:, :-1]).any()
    )
    if is_uneven:
        return None
    crossed = _crossings(layout, network)
    strides: Ints = np.array(network.strides, np.int64)
    # A rank uses its own network card. Other links are shared by the rings that cross them.
    part = np.where(strides == per_host, per_node / per_host, 1 / crossed.clip(1))
    rates = network.bandwidths * part / 1e9
    inner, outer = (strides < per_host) & (crossed > 0), (strides >= per_host) & (crossed > 0)
    reached = (1.0, 1.0) if network.measured else (NVLINK_REACHED, NETWORK_REACHED)
    latency = float(network.latencies[outer].max(initial=0.0))
    return NcclGroup(
        gpu,
        layout.ranks,
        nodes,
        inside=float(rates[inner].min(initial=math.inf)) * reached[0],
        between=float(rates[outer].min(initial=math.inf)) * reached[1],
        delay=max(0.0, latency - NETWORK_LATENCY) * 1e6,
    )


@lru_cache(maxsize=1024)
def _crossings(layout: Layout, network: Network) -> Floats:
    """The number of hops over the busiest link of each level [levels], in the rings of all groups."""
    return np.array([max(up.max(), down.max()) for up, down in _hops(layout, network)], np.float64)


@lru_cache(maxsize=64)
def _hops(layout: Layout, network: Network) -> tuple[tuple[Ints, Ints], ...]:
    """For each level, the number of hops that leave and that enter each member, [members] each.

    Counts the rings of all groups. A ring visits all ranks of a node before the next node, in the order of
    the first rank of each node.
    """
    groups = layout.groups
    node = groups // network.topology.host_places
    # Sort the ranks of each group by node. Then give each rank the position of the first rank of its node,
    # and sort the ranks by these positions.
    by_node = np.argsort(node, axis=1, kind="stable")
    ordered: Ints = np.take_along_axis(node, by_node, axis=1)
    begins = np.zeros(node.shape, np.int64)
    begins[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, layout.ranks), 0)
    first = np.take_along_axis(by_node, np.maximum.accumulate(begins, axis=1), axis=1)
    rank_order = np.empty_like(first)
    np.put_along_axis(rank_order, by_node, first, axis=1)
    ring = np.take_along_axis(groups, np.argsort(rank_order, axis=1, kind="stable"), axis=1)
    following = np.roll(ring, -1, axis=1)

    def counted(level: int) -> tuple[Ints, Ints]:
        """The hops that leave and that enter each member of `level`."""
        source, sink = network.units(ring, level), network.units(following, level)
        crossing, members = source != sink, network.places // network.strides[level]
        up, down = (np.bincount(units[crossing], minlength=members) for units in (source, sink))
        return up, down

    return tuple(counted(level) for level in range(len(network.levels)))


@lru_cache(maxsize=1024)
def _shares(kind: str, algorithm: str, layout: Layout, network: Network) -> Floats:
    """The part of the buffer that a link carries per hop of a ring over it, for each level [levels].

    A ring sends all blocks but one, and twice as many in an all-reduce. A switch that adds receives and sends
    each byte once. The two trees between nodes carry half of the buffer each, in both directions.
    """
    ring = 1.0 if kind in ROOTED else (layout.ranks - 1) / layout.ranks
    ring *= 2 if kind == "all_reduce" else 1
    inside = min(ring, 1.0) if algorithm.startswith("nvls") else ring
    per_host = network.topology.host_places
    nodes = len(np.unique(layout.groups[0] // per_host))
    between = 2 * (nodes - 1) / nodes if algorithm in ("tree", "nvls_tree") else ring
    return np.array([inside if stride < per_host else between for stride in network.strides])
