"""The rounds of a program laid on a network: which links each transfer uses, and how much each link carries.

Sizes are counted in chunks, so one pattern serves every message size. Only the first group of a layout is
followed; what the other groups put on its links is in the loads, which is exact where all groups lie alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from commplan.collectives.program import Bools, ChunkProgram, Ints, Round
from commplan.cost.network.network import Floats, Layout, Network


@dataclass(frozen=True, eq=False)
class Lanes:
    """Where the transfers of one round run. Shared by all rounds with the same partners and sizes.

    level [t]: the outermost level each message crosses, -1 between ranks of one place.
    link [t, 2 * levels]: the links of each message, as indices into `used`, len(used) where it has none.
    used [l]: the links of the round: twice the level's first link plus direction, over the whole machine.
    load [l]: chunks on each link, of all groups. per_level [levels]: the largest load on each level.
    most [levels]: chunks of one message at most, on each level. even: all ranks send one message and receive
    one, and every link of a level that is used carries the same. alike: even, and all cross the same level.
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
class TrafficStep:
    """One round: its messages between the ranks of the first group.

    A message from `src` to `dst` [t] holds `size` chunks [t], `reduced` of them to be added. `takes` and
    `gives`: where they are read and written in a flat [ranks * chunks] array, in order of messages; `message`
    says to which message each belongs, `begins` [t] where those of each begin.
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
        """The messages on each link of the round in turn, and where each link's begin."""
        link = self.lanes.link
        message = np.repeat(np.arange(len(link)), link.shape[1])
        flat = link.ravel()
        real = flat < len(self.lanes.used)
        order = np.argsort(flat[real], kind="stable")
        return message[real][order], np.searchsorted(flat[real][order], np.arange(len(self.lanes.used)))

    @cached_property
    def columns(self) -> tuple[Ints, ...]:
        """The columns of `Lanes.link` that hold a link."""
        has_link = (self.lanes.link < len(self.lanes.used)).any(axis=0)
        return tuple(self.lanes.link[:, index].copy() for index in np.flatnonzero(has_link))

    @cached_property
    def is_single(self) -> bool:
        """Whether each message holds one chunk."""
        return len(self.takes) == len(self.src)

    @cached_property
    def gives_once(self) -> bool:
        """Whether no two messages are written to one slot."""
        return len(np.unique(self.gives)) == len(self.gives)

    @cached_property
    def turn(self) -> Floats:
        """The place of each message among those of its sender, from 1 [t]."""
        # Messages are in order of senders.
        begins = np.searchsorted(self.src, self.src)
        return np.arange(1.0, len(self.src) + 1) - begins


@dataclass(frozen=True, eq=False)
class Pattern:
    """A program on a layout. level_of [links]: the level of each link that the first group uses, which are
    what `Lanes.used` counts. load: chunks on the busiest link of each level, over the whole program. own:
    whether there is one group only."""

    ranks: int
    chunks: int
    steps: tuple[TrafficStep, ...]
    level_of: Ints
    load: Floats
    own: bool

    @cached_property
    def even(self) -> bool:
        """Whether every link of a level is as busy as any other, in every round."""
        return all(step.lanes.even for step in self.steps)

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks do the same in every round, so that one stands for all."""
        return all(step.lanes.alike for step in self.steps)


def lay_out(program: ChunkProgram, layout: Layout, network: Network) -> Pattern:
    """The pattern of `program`, rank r of group g at place `layout.groups[g, r]`."""
    first = _first_links(network)
    seen: dict[tuple[bytes, ...], Lanes] = {}
    laid = [
        step for round_ in program.rounds if (step := _step(round_, program, layout, network, first, seen))
    ]
    used = np.unique(np.concatenate([np.zeros(0, np.int64), *(lanes.used for lanes in seen.values())]))
    for key, lanes in seen.items():
        seen[key] = replace(lanes, used=np.searchsorted(used, lanes.used))
    steps = tuple(replace(step, lanes=seen[_key(step.src, step.dst, step.size)]) for step in laid)
    level_of = np.searchsorted(first, used, "right") - 1
    total, load = np.zeros(len(used)), np.zeros(len(network.levels))
    for step in steps:
        total[step.lanes.used] += step.lanes.load
    np.maximum.at(load, level_of, total)
    return Pattern(program.ranks, program.chunks, steps, level_of, load, len(layout.groups) == 1)


def _key(src: Ints, dst: Ints, size: Ints) -> tuple[bytes, ...]:
    return src.tobytes(), dst.tobytes(), size.tobytes()


def _first_links(network: Network) -> Ints:
    """The number of the first link of each level, and of all links: two for each member."""
    members = [2 * (network.places // stride) for stride in network.strides]
    return np.concatenate([[0], np.cumsum(members)]).astype(np.int64)


def _step(
    transfers: Round,
    program: ChunkProgram,
    layout: Layout,
    network: Network,
    first: Ints,
    seen: dict[tuple[bytes, ...], Lanes],
) -> TrafficStep | None:
    parts = [part for part in transfers if len(part.src)]
    if not parts:
        return None
    src, dst, chunk, count = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "chunk", "count")
    )
    added = np.concatenate([part.count * part.reduce for part in parts])
    pair, of = np.unique(src * layout.ranks + dst, return_inverse=True)
    order = np.argsort(of, kind="stable")
    of, chunk, count = of[order], chunk[order], count[order]
    size = np.bincount(of, count).astype(np.int64)
    reduced = np.bincount(of, added[order]).astype(np.int64)
    src, dst = pair // layout.ranks, pair % layout.ranks
    key = _key(src, dst, size)
    if key not in seen:
        seen[key] = _lanes(src, dst, size.astype(np.float64), layout, network, first)
    takes = _runs(src[of] * program.chunks + chunk, count)
    gives = _runs(dst[of] * program.chunks + chunk, count)
    return TrafficStep(
        src, dst, size, reduced, takes, gives, np.repeat(of, count), np.cumsum(size) - size, seen[key]
    )


def _runs(start: Ints, count: Ints) -> Ints:
    """start[i], start[i] + 1, .. for `count[i]` numbers, for each i in turn."""
    ends = np.cumsum(count)
    return np.arange(int(ends[-1])) + np.repeat(start - (ends - count), count)


def _lanes(src: Ints, dst: Ints, size: Floats, layout: Layout, network: Network, first: Ints) -> Lanes:
    levels = len(network.levels)
    total = np.zeros(int(first[-1]))
    level = np.full(len(src), -1, np.int64)
    link = np.full((len(src), 2 * levels), -1, np.int64)
    for index in range(levels):
        units, times = _sharing(layout, network, index)
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
def _sharing(layout: Layout, network: Network, level: int) -> tuple[Ints, int]:
    """The members of `level` that hold the ranks, for the groups that share links with the first [g, n].

    Where all of those lie in the very same members: of the first alone, and how many groups they are.
    """
    units = network.units(layout.groups, level)
    same: Bools = np.all(units == units[0], axis=1)
    near: Bools = np.any(np.isin(units, units[0]), axis=1)
    if np.array_equal(same, near):
        return units[:1], int(same.sum())
    return np.concatenate([units[:1], units[1:][near[1:]]]), 1


def _even(src: Ints, dst: Ints, size: Floats, ranks: int) -> bool:
    """Whether every rank sends one message and receives one, all of one size."""
    each = np.ones(ranks, np.int64)
    return (
        len(src) == ranks
        and bool(np.all(size == size[0]))
        and np.array_equal(np.bincount(src, minlength=ranks), each)
        and np.array_equal(np.bincount(dst, minlength=ranks), each)
    )
