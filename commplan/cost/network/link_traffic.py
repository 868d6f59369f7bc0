"""Maps the rounds of a program to a network: the links of each transfer, and the load of each link.

Sizes are counted in chunks, so one pattern serves every message size. Only the first group of a layout is
simulated. The loads of its links include the other groups, which is exact if all groups are placed alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from commplan.collectives.program import Bools, ChunkProgram, Ints, Round
from commplan.cost.network.network import Floats, Layout, Network


@dataclass(frozen=True, eq=False)
class Lanes:
    """The links of the messages of one round, shared by all rounds with the same partners and sizes.

    In shapes, t is the number of messages of the round between ranks of the first group, and l the number of
    links that they use. The two directions of a link count as two links.

    Attributes:
        level: The outermost level that each message crosses, -1 between ranks of one place; [t].
        link: The links of each message, as indices into `used`: for each level, the sender's up link and the
            receiver's down link. len(used) if the message does not use the link; [t, 2 * levels].
        used: The links of the round in ascending order, as indices into `Pattern.level_of`; [l]. While
            `lay_out` runs, they are numbers over the whole machine, as in `_first_links`.
        load: Chunks on each link, of all groups; [l].
        per_level: The largest load at each level; [levels].
        most: The largest number of chunks of a message whose outermost level is this; 0 if there is none;
            [levels].
        even: Whether every rank sends one message and receives one, all of the same size, and all used links
            of a level have equal loads.
        alike: Whether, in addition, all messages have the same outermost level.
    """

    level: Ints
    link: Ints
    used: Ints
    load: Floats
    per_level: Floats
    most: Floats
    even: bool
    alike: bool


@dataclass(frozen=True, eq=False)
class RoundTraffic:
    """One round: its t messages between the ranks of the first group.

    All chunks from one rank to another are one message. Messages are sorted by sender, then by receiver. A
    slot is an index into a flat [ranks * chunks] array; c is the number of chunks of all messages.

    Attributes:
        src: The sender of each message, as a rank of the group; [t].
        dst: The receiver of each message; [t].
        size: The number of chunks of each message; [t].
        reduced: The number of these chunks that the receiver adds to its own; [t].
        takes: The slots that are read, in the order of messages; [c].
        gives: The slots that are written, in the order of messages; [c].
        message: The message of each entry of `takes` and `gives`; [c].
        begins: The first entry of each message in `takes` and `gives`; [t].
        lanes: The links of the messages.
    """

    src: Ints
    dst: Ints
    size: Ints
    reduced: Ints
    takes: Ints
    gives: Ints
    message: Ints
    begins: Ints
    lanes: Lanes

    @cached_property
    def users(self) -> tuple[Ints, Ints]:
        """The messages that use each link of the round, link by link, and the offset of each link [l]."""
        link = self.lanes.link
        message = np.repeat(np.arange(len(link)), link.shape[1])
        flat = link.ravel()
        has_link = flat < len(self.lanes.used)
        order = np.argsort(flat[has_link], kind="stable")
        return message[has_link][order], np.searchsorted(
            flat[has_link][order], np.arange(len(self.lanes.used))
        )

    @cached_property
    def columns(self) -> tuple[Ints, ...]:
        """The columns of `Lanes.link` that contain a link of some message; [t] each."""
        has_link = (self.lanes.link < len(self.lanes.used)).any(axis=0)
        return tuple(self.lanes.link[:, index].copy() for index in np.flatnonzero(has_link))

    @cached_property
    def is_single(self) -> bool:
        """Whether each message is one chunk."""
        return len(self.takes) == len(self.src)

    @cached_property
    def gives_once(self) -> bool:
        """Whether no two messages are written to the same slot."""
        return len(np.unique(self.gives)) == len(self.gives)

    @cached_property
    def turn(self) -> Floats:
        """The position of each message among those of its sender, from 1; [t]."""
        begins = np.searchsorted(self.src, self.src)
        return np.arange(1.0, len(self.src) + 1) - begins


@dataclass(frozen=True, eq=False)
class Pattern:
    """A program on a layout.

    Attributes:
        ranks: The number of ranks of a group.
        chunks: The number of chunks of the whole buffer.
        rounds: The rounds that contain messages.
        level_of: The level of each link that the first group uses in some round; [links].
        load: Chunks on the busiest link of each level, over the whole program and all groups; [levels].
        is_single_group: Whether there is only one group.
    """

    ranks: int
    chunks: int
    rounds: tuple[RoundTraffic, ...]
    level_of: Ints
    load: Floats
    is_single_group: bool

    @cached_property
    def even(self) -> bool:
        """Whether `Lanes.even` holds in every round."""
        return all(traffic.lanes.even for traffic in self.rounds)

    @cached_property
    def alike(self) -> bool:
        """Whether `Lanes.alike` holds in every round. One rank then represents all."""
        return all(traffic.lanes.alike for traffic in self.rounds)


def lay_out(program: ChunkProgram, layout: Layout, network: Network) -> Pattern:
    """The pattern of `program`, with rank r of group g at place `layout.groups[g, r]`."""
    first = _first_links(network)
    lanes_by_key: dict[tuple[bytes, ...], Lanes] = {}
    # First, links are numbered over the whole machine. Then they are renumbered, because few are used.
    mapped = [
        traffic
        for round_ in program.rounds
        if (traffic := _round_traffic(round_, program, layout, network, first, lanes_by_key))
    ]
    used = np.unique(
        np.concatenate([np.zeros(0, np.int64), *(lanes.used for lanes in lanes_by_key.values())])
    )
    for key, lanes in lanes_by_key.items():
        lanes_by_key[key] = replace(lanes, used=np.searchsorted(used, lanes.used))
    rounds = tuple(
        replace(traffic, lanes=lanes_by_key[_key(traffic.src, traffic.dst, traffic.size)])
        for traffic in mapped
    )
    level_of = np.searchsorted(first, used, "right") - 1
    total = np.zeros(len(used))
    load = np.zeros(len(network.levels))
    for traffic in rounds:
        total[traffic.lanes.used] += traffic.lanes.load
    np.maximum.at(load, level_of, total)
    return Pattern(program.ranks, program.chunks, rounds, level_of, load, len(layout.groups) == 1)


def _key(src: Ints, dst: Ints, size: Ints) -> tuple[bytes, ...]:
    """A dictionary key of rounds that share `Lanes`."""
    return src.tobytes(), dst.tobytes(), size.tobytes()


def _first_links(network: Network) -> Ints:
    """The number of the first link of each level, then the number of all links; [levels + 1].

    The up link of member m of a level has the number of the level's first link plus 2 m. Its down link has
    the next number.
    """
    members = [2 * (network.places // stride) for stride in network.strides]
    return np.concatenate([[0], np.cumsum(members)]).astype(np.int64)


def _round_traffic(
    transfers: Round,
    program: ChunkProgram,
    layout: Layout,
    network: Network,
    first: Ints,
    lanes_by_key: dict[tuple[bytes, ...], Lanes],
) -> RoundTraffic | None:
    """The traffic of one round; None if it has no transfers."""
    parts = [part for part in transfers if len(part.src)]
    if not parts:
        return None
    src, dst, chunk, count = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "chunk", "count")
    )
    added = np.concatenate([part.count * part.reduce for part in parts])
    # Transfers between the same two ranks become one message.
    pair, pair_index = np.unique(src * layout.ranks + dst, return_inverse=True)
    order = np.argsort(pair_index, kind="stable")
    pair_index, chunk, count = pair_index[order], chunk[order], count[order]
    size = np.bincount(pair_index, count).astype(np.int64)
    reduced = np.bincount(pair_index, added[order]).astype(np.int64)
    src, dst = pair // layout.ranks, pair % layout.ranks
    key = _key(src, dst, size)
    if key not in lanes_by_key:
        lanes_by_key[key] = _lanes(src, dst, size.astype(np.float64), layout, network, first)
    takes = _runs(src[pair_index] * program.chunks + chunk, count)
    gives = _runs(dst[pair_index] * program.chunks + chunk, count)
    return RoundTraffic(
        src,
        dst,
        size,
        reduced,
        takes,
        gives,
        np.repeat(pair_index, count),
        np.cumsum(size) - size,
        lanes_by_key[key],
    )


def _runs(start: Ints, count: Ints) -> Ints:
    """start[i], start[i] + 1, .. for `count[i]` numbers, concatenated over i."""
    ends = np.cumsum(count)
    return np.arange(int(ends[-1])) + np.repeat(start - (ends - count), count)


def _lanes(src: Ints, dst: Ints, size: Floats, layout: Layout, network: Network, first: Ints) -> Lanes:
    """The links that each message uses, and their loads. `size` is in chunks, `first` is `_first_links`."""
    levels = len(network.levels)
    total = np.zeros(int(first[-1]))
    level = np.full(len(src), -1, np.int64)
    link = np.full((len(src), 2 * levels), -1, np.int64)
    for index in range(levels):
        units, times = _units_on_shared_links(layout, network, index)
        source, sink = units[:, src], units[:, dst]
        differ = source != sink
        weights = np.broadcast_to(size * times, differ.shape)[differ]
        for direction, end in enumerate((source, sink)):
            ids = first[index] + 2 * end + direction
            np.add.at(total, ids[differ], weights)
            link[:, 2 * index + direction] = np.where(differ[0], ids[0], -1)
        level += differ[0]
    used = np.unique(link[link >= 0])
    load = total[used]
    owner = np.searchsorted(first, used, "right") - 1
    per_level, most = np.zeros(levels), np.zeros(levels)
    np.maximum.at(per_level, owner, load)
    np.maximum.at(most, level[level >= 0], size[level >= 0])
    compact = np.where(link >= 0, np.searchsorted(used, link), len(used))
    even = _even(src, dst, size, layout.ranks) and all(
        np.allclose(load[owner == index], per_level[index]) for index in range(levels)
    )
    alike = even and bool(np.all(level == level[0]))
    return Lanes(level, compact, used, load, per_level, most, even, alike)


@lru_cache(maxsize=1024)
def _units_on_shared_links(layout: Layout, network: Network, level: int) -> tuple[Ints, int]:
    """The groups that share links of `level` with the first group, and a factor for their loads.

    Returns:
        The member of each rank [groups, ranks], and the factor 1. If all of these groups are in the same
        members, it returns only the first group, and the number of groups as the factor.
    """
    units = network.units(layout.groups, level)
    same: Bools = np.all(units == units[0], axis=1)
    shares_links: Bools = np.any(np.isin(units, units[0]), axis=1)
    if np.array_equal(same, shares_links):
        return units[:1], int(same.sum())
    return np.concatenate([units[:1], units[1:][shares_links[1:]]]), 1


def _even(src: Ints, dst: Ints, size: Floats, ranks: int) -> bool:
    """Whether every rank sends one message and receives one, all of the same size."""
    ones = np.ones(ranks, np.int64)
    return (
        len(src) == ranks
        and bool(np.all(size == size[0]))
        and np.array_equal(np.bincount(src, minlength=ranks), ones)
        and np.array_equal(np.bincount(dst, minlength=ranks), ones)
    )
