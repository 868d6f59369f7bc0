"""Lower bounds on the time of a collective, if links have the latency and bandwidth of the topology.

For each level, what must leave (or enter) its members, over all groups, divided by what their links carry,
plus the latency of the level; and for short messages the fastest way in which one rank's word reaches all.
Bytes: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication" (2007), applied to the members
of each level as if they were ranks. Words: Karp, Sahay, Santos and Schauser, "Optimal broadcast and summation
in the LogP model" (1993).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from commplan.collectives.program import Bools, Ints
from commplan.cost.network.network import Floats, Layout, Network

PARTNERS = 1024  # ranks beyond these are left out of the bound on words: it stays a bound


def lower_bound(kind: str, nbytes: float, layout: Layout, network: Network, *, root: int = 0) -> float:
    """Seconds that the collective takes at least. nbytes: of the whole buffer, as in `collective_time`."""
    reached = [level for level in range(len(network.levels)) if _spread(layout, network, level)]
    if not reached or layout.ranks == 1:
        return 0.0
    most = busiest_bytes(kind, nbytes, layout, network, root=root)
    levels = network.levels
    moved = max(float(most[i]) / levels[i].bandwidth + levels[i].latency for i in reached)
    least = min(levels[level].latency for level in reached)
    if kind in ("reduce", "gather", "scatter"):  # nobody's word must reach all
        return moved
    return max(moved, _words(min(layout.ranks, PARTNERS), network.overhead, least))


@lru_cache(maxsize=1024)
def _busiest(kind: str, layout: Layout, network: Network, root: int) -> Floats:
    """Of one byte."""
    return np.array([_of_level(kind, layout, network, level, root) for level in range(len(network.levels))])


def busiest_bytes(kind: str, nbytes: float, layout: Layout, network: Network, *, root: int = 0) -> Floats:
    """Bytes on the busiest link of each level, at least [levels]."""
    return _busiest(kind, layout, network, root) * nbytes


@lru_cache(maxsize=1024)
def _spread(layout: Layout, network: Network, level: int) -> bool:
    units = network.units(layout.groups[:1], level)
    return bool((units != units[:, :1]).any())


def _of_level(kind: str, layout: Layout, network: Network, level: int, root: int) -> float:
    units = network.units(layout.groups, level)
    groups, ranks = units.shape
    # Only the members that a group has ranks in: most groups have none in most members.
    inside = np.sort(units, axis=1)
    begins = np.ones(units.shape, np.bool_)
    begins[:, 1:] = inside[:, 1:] != inside[:, :-1]
    at = np.flatnonzero(begins)
    held = np.diff(at, append=units.size)  # ranks of a group in a member
    group, member = at // ranks, inside.ravel()[at]
    spans = np.bincount(group, minlength=groups)
    if int(spans.max()) < 2:
        return 0.0
    wide: Bools = spans[group] > 1
    others = np.where(wide, ranks - held, 0)
    share = 1.0 / ranks
    # What all members together must send, spread evenly over their links, is a bound as well.
    evenly = float(((spans - 1) * (spans > 1)).sum()) / max(1, np.count_nonzero(np.bincount(member[wide])))
    match kind:
        case "all_reduce":  # a switch that adds takes each byte once, and gives it once
            return (
                _most(member, wide) if network.adds_in_switch(level) else max(2 * evenly, _most(member, wide))
            )
        case "reduce_scatter" | "all_gather":
            return max(evenly, _most(member, others) * share)
        case "all_to_all" | "swap":
            return _most(member, held * others) * share
        case "shift":  # to the rank `root` further along
            return float(np.bincount(units[units != np.roll(units, -root, axis=1)], minlength=1).max())
        case "scatter" | "gather":
            at_root = member == units[group, root]
            return _most(member, np.where(at_root, others, 0)) * share
        case _:  # broadcast: members but the root's take all bytes in, the root's gives them; reduce mirrored
            at_root = member == units[group, root]
            return max(_most(member, wide & ~at_root), _most(member, wide & at_root))


def _most(member: Ints, amounts: Ints | Bools) -> float:
    """The largest sum of `amounts` of one member."""
    return float(np.bincount(member, weights=amounts).max())


@lru_cache(maxsize=256)
def _words(ranks: int, overhead: float, latency: float) -> float:
    """The earliest time at which one rank's word has reached all, each sending one message after another."""
    if ranks < 2 or overhead * 1000 < latency:
        return latency if ranks > 1 else 0.0
    informed = [1]  # newly told in each tick of one overhead
    delay = math.floor((2 * overhead + latency) / overhead)  # whole ticks only: never above the truth
    knowing = 1
    while knowing < ranks:
        tick = len(informed)
        fresh = sum(informed[: tick - delay + 1]) if tick >= delay else 0
        informed.append(fresh)
        knowing += fresh
    return (len(informed) - 1) * overhead
