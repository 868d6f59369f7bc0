"""Lower bounds on the time of a collective on links with the latency and bandwidth of the topology.

There are two bounds, and `lower_bound` returns the larger one:

- For each level: the bytes that must leave or enter its members, over all groups, divided by the bandwidth of
  their links, plus the latency of the level.
- For short messages, if words of one rank reach all ranks: the time of the fastest broadcast of one word.

Bytes: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication" (2007), applied to the members
of each level instead of ranks. Words: Karp, Sahay, Santos and Schauser, "Optimal broadcast and summation in
the LogP model" (1993).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from commplan.collectives.program import Bools, Ints
from commplan.cost.network.network import Floats, Layout, Network

# Ranks. `_words` considers at most this many, to limit its time; for more ranks its result is still a bound.
PARTNERS = 1024


def lower_bound(kind: str, nbytes: float, layout: Layout, network: Network, *, root: int = 0) -> float:
    """A lower bound in seconds on the time of a collective, for all algorithms.

    Args:
        kind: The kind of collective.
        nbytes: Bytes of the whole buffer, as in `CollectiveQuery`.
        layout: The groups of ranks, which communicate at the same time.
        network: The network.
        root: The index of the root in its group; for a `shift`, the distance to the destination.

    Returns:
        The bound; 0 for groups of one rank, or if all ranks are at one place.
    """
    reached = [level for level in range(len(network.levels)) if _spread(layout, network, level)]
    if not reached or layout.ranks == 1:
        return 0.0
    busiest = busiest_bytes(kind, nbytes, layout, network, root=root)
    levels = network.levels
    moved = max(float(busiest[i]) / levels[i].bandwidth + levels[i].latency for i in reached)
    lowest_latency = min(levels[level].latency for level in reached)
    if kind in ("reduce", "gather", "scatter", "shift"):  # no word of one rank must reach all ranks
        return moved
    return max(moved, _words(min(layout.ranks, PARTNERS), network.overhead, lowest_latency))


@lru_cache(maxsize=1024)
def _busiest_unit(kind: str, layout: Layout, network: Network, root: int) -> Floats:
    """`busiest_bytes` for one byte."""
    return np.array([_of_level(kind, layout, network, level, root) for level in range(len(network.levels))])


def busiest_bytes(kind: str, nbytes: float, layout: Layout, network: Network, *, root: int = 0) -> Floats:
    """A lower bound on the bytes on the busiest link of each level [levels], innermost first.

    Counts one direction and the traffic of all groups. The arguments are those of `lower_bound`.
    """
    return _busiest_unit(kind, layout, network, root) * nbytes


@lru_cache(maxsize=1024)
def _spread(layout: Layout, network: Network, level: int) -> bool:
    """Whether the first group has ranks in more than one member of `level`."""
    units = network.units(layout.groups[:1], level)
    return bool((units != units[:, :1]).any())


def _of_level(kind: str, layout: Layout, network: Network, level: int, root: int) -> float:
    """A lower bound on the bytes on the busiest link of a level, as a multiple of the buffer's bytes."""
    units = network.units(layout.groups, level)
    groups, ranks = units.shape
    # One entry for each pair of a group and a member that contains ranks of it. A table of all pairs would
    # be large, because most groups have no ranks in most members.
    inside = np.sort(units, axis=1)
    begins = np.ones(units.shape, np.bool_)
    begins[:, 1:] = inside[:, 1:] != inside[:, :-1]
    starts = np.flatnonzero(begins)
    rank_count = np.diff(starts, append=units.size)  # the number of ranks of a group in a member
    group, member = starts // ranks, inside.ravel()[starts]
    spans = np.bincount(group, minlength=groups)  # the number of members that contain ranks of a group
    if int(spans.max()) < 2:
        return 0.0
    wide: Bools = spans[group] > 1  # entries of groups that cross the level
    outside = np.where(wide, ranks - rank_count, 0)  # ranks of the group in other members
    share = 1.0 / ranks  # one rank's block
    # The bytes of all members, spread evenly over their links, are a bound, too.
    evenly = float(((spans - 1) * (spans > 1)).sum()) / max(1, np.count_nonzero(np.bincount(member[wide])))
    match kind:
        case "all_reduce":  # a switch that adds receives and sends each byte once
            return (
                _maximum_by_member(member, wide)
                if network.adds_in_switch(level)
                else max(2 * evenly, _maximum_by_member(member, wide))
            )
        case "reduce_scatter" | "all_gather":
            return max(evenly, _maximum_by_member(member, outside) * share)
        case "all_to_all" | "swap":
            return _maximum_by_member(member, rank_count * outside) * share
        case "shift":  # each rank sends to the rank `root` places further
            return float(np.bincount(units[units != np.roll(units, -root, axis=1)], minlength=1).max())
        case "scatter" | "gather":
            at_root = member == units[group, root]
            return _maximum_by_member(member, np.where(at_root, outside, 0)) * share
        case _:  # broadcast: all bytes leave the root's member and enter the others; a reduce is the reverse
            at_root = member == units[group, root]
            return max(
                _maximum_by_member(member, wide & ~at_root), _maximum_by_member(member, wide & at_root)
            )


def _maximum_by_member(member: Ints, amounts: Ints | Bools) -> float:
    """The largest sum of `amounts` over the entries of one member."""
    return float(np.bincount(member, weights=amounts).max())


@lru_cache(maxsize=256)
def _words(ranks: int, overhead: float, latency: float) -> float:
    """A lower bound in seconds on a broadcast of one word, if each rank sends one message after another.

    `overhead` and `latency` are seconds: of the processor for each message, and of the fastest level.
    """
    if ranks < 2:
        return 0.0
    if overhead * 1000 < latency:  # one message to each rank takes little longer than one latency
        return latency
    informed = [1]  # ranks that receive the word in each tick of one overhead
    delay = math.floor((2 * overhead + latency) / overhead)  # whole ticks, rounded down to stay a lower bound
    total = 1
    while total < ranks:
        tick = len(informed)
        receivers = sum(informed[: tick - delay + 1]) if tick >= delay else 0
        informed.append(receivers)
        total += receivers
    return (len(informed) - 1) * overhead
