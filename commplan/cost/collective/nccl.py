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

COLLECTIVES = (*NATIVE_KINDS, "reduce")
NVLINK_REACHED = 0.8  # of the data sheet: channels of 20 GB/s on links of 25, 360 GB/s on 450
NETWORK_REACHED = 0.96  # channels of 24 GB/s on network cards of 25, of 48 on 50
NETWORK_LATENCY = 6e-6  # seconds; latency of a level of the topology that NCCL's own latencies include


def choose(kind: str, nbytes: float, layout: Layout, network: Network) -> tuple[NcclChoice, Floats] | None:
    """The fastest choice of NCCL, and the bytes on the busiest link of each level [levels].

    Args:
        kind: The kind of collective.
        nbytes: Bytes of the whole buffer, as in `collective_time`.
        layout: The groups of ranks, with equally many ranks on each node.
        network: The network of a topology that names its devices.

    Returns:
        The choice; None if NCCL is not modeled for the collective, the ranks or the devices.
    """
    group = _group(layout, network) if kind in COLLECTIVES else None
    if group is None:
        return None
    best = min(choices(kind, nbytes, group), key=lambda choice: choice.seconds(nbytes))
    return best, _crossings(layout, network) * _shares(kind, best.algorithm, layout, network) * nbytes


def link_loads(
    kind: str, algorithm: str, layout: Layout, network: Network
) -> Iterator[tuple[Floats, Floats]]:
    """For each level, the part of the buffer that leaves and enters each member on its link."""
    shares = _shares(kind, algorithm, layout, network)
    for (up, down), share in zip(_hops(layout, network), shares, strict=True):
        yield up * share, down * share


@lru_cache(maxsize=1024)
def _group(layout: Layout, network: Network) -> NcclGroup | None:
    """The GPUs of a communicator as NCCL sees them.

    None without GPUs, or if nodes have different numbers of ranks.
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
    """Hops of all groups' rings over the busiest link of each level [levels]."""
    return np.array([max(up.max(), down.max()) for up, down in _hops(layout, network)], np.float64)


@lru_cache(maxsize=64)
def _hops(layout: Layout, network: Network) -> tuple[tuple[Ints, Ints], ...]:
    """For each level, the hops of all rings that leave and enter each member; rings visit node by node."""
    groups = layout.groups
    node = groups // network.topology.host_places
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
        source, sink = network.units(ring, level), network.units(following, level)
        crossing, members = source != sink, network.places // network.strides[level]
        up, down = (np.bincount(units[crossing], minlength=members) for units in (source, sink))
        return up, down

    return tuple(counted(level) for level in range(len(network.levels)))


@lru_cache(maxsize=1024)
def _shares(kind: str, algorithm: str, layout: Layout, network: Network) -> Floats:
    """For each level, the part of the buffer that a link carries per hop of a ring over it [levels].

    A ring sends all parts but one, twice for a sum. A switch that adds receives and sends each byte once. The
    two trees between nodes carry half of the buffer each, in both directions.
    """
    ring = 1.0 if kind in ROOTED else (layout.ranks - 1) / layout.ranks
    ring *= 2 if kind == "all_reduce" else 1
    inside = min(ring, 1.0) if algorithm.startswith("nvls") else ring
    per_host = network.topology.host_places
    nodes = len(np.unique(layout.groups[0] // per_host))
    between = 2 * (nodes - 1) / nodes if algorithm in ("tree", "nvls_tree") else ring
    return np.array([inside if stride < per_host else between for stride in network.strides])
