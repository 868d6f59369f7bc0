"""The rounds of a program laid on a network: which links each transfer uses, and how much each link carries.

Sizes are counted in chunks, so one pattern serves every message size. Only the first group of a layout is
followed; what the other groups put on its links is in the loads, which is exact where all groups lie alike.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from commplan.collectives.program import Ints, Program, Round
from commplan.simulate.network import Floats, Layout, Network


@dataclasses.dataclass(frozen=True, eq=False)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One round: its messages between the ranks of the first group.

    A message from `src` to `dst` [t] holds `size` chunks [t], `reduced` of them to be added, in runs: chunks
    `chunk` to `chunk + count - 1` of message `of` [r], in order of messages.
    """

    src: Ints
    dst: Ints
    size: Ints
    reduced: Ints
    chunk: Ints
    count: Ints
    of: Ints
    lanes: Lanes


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """A program on a layout. `links`: how many links the machine has, up and down each counted."""

    ranks: int
    chunks: int
    steps: tuple[Step, ...]
    links: int
    level_of: Ints  # [links]

    @functools.cached_property
    def even(self) -> bool:
        """Whether every link of a level is as busy as any other, in every round."""
        return all(step.lanes.even for step in self.steps)

    @functools.cached_property
    def alike(self) -> bool:
        """Whether all ranks do the same in every round, so that one stands for all."""
        return all(step.lanes.alike for step in self.steps)


def lay_out(program: Program, layout: Layout, network: Network) -> Pattern:
    """The pattern of `program`, rank r of group g at place `layout.groups[g, r]`."""
    first = _first_links(network)
    seen: dict[tuple[bytes, ...], Lanes] = {}
    steps: list[Step] = []
    for one in program.rounds:
        step = _step(one, layout, network, first, seen)
        if step is not None:
            steps.append(step)
    level_of = np.repeat(np.arange(len(network.levels)), np.diff(first))
    return Pattern(program.ranks, program.chunks, tuple(steps), int(first[-1]), level_of)


def _first_links(network: Network) -> Ints:
    """The number of the first link of each level, and of all links: two for each member."""
    members = [2 * (network.places // stride) for stride in network.strides]
    return np.concatenate([[0], np.cumsum(members)]).astype(np.int64)


def _step(
    one: Round, layout: Layout, network: Network, first: Ints, seen: dict[tuple[bytes, ...], Lanes]
) -> Step | None:
    parts = [part for part in one if len(part.src)]
    if not parts:
        return None
    src, dst, chunk, count = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "chunk", "count")
    )
    added = np.concatenate([part.count * part.reduce for part in parts])
    pair, of = np.unique(src * layout.ranks + dst, return_inverse=True)
    order = np.argsort(of, kind="stable")
    of = of[order]
    size = np.bincount(of, count[order]).astype(np.int64)
    reduced = np.bincount(of, added[order]).astype(np.int64)
    src, dst = pair // layout.ranks, pair % layout.ranks
    key = (pair.tobytes(), size.tobytes())
    if key not in seen:
        seen[key] = _lanes(src, dst, size.astype(np.float64), layout, network, first)
    return Step(src, dst, size, reduced, chunk[order], count[order], of, seen[key])


def _lanes(src: Ints, dst: Ints, size: Floats, layout: Layout, network: Network, first: Ints) -> Lanes:
    groups, levels = len(layout.groups), len(network.levels)
    total = np.zeros(int(first[-1]))
    level = np.full(len(src), -1, np.int64)
    link = np.full((len(src), 2 * levels), -1, np.int64)
    weights = np.broadcast_to(size, (groups, len(size))).ravel()
    for index in range(levels):
        units = network.units(layout.groups, index)
        source, sink = units[:, src], units[:, dst]
        differ = source != sink
        for direction, end in enumerate((source, sink)):
            ids = first[index] + 2 * end + direction
            crossing = differ.ravel()
            total += np.bincount(ids.ravel()[crossing], weights[crossing], len(total))
            link[:, 2 * index + direction] = np.where(differ[0], ids[0], -1)
        level += differ[0]
    used = np.unique(link[link >= 0])
    load = total[used]
    owner = np.searchsorted(first, used, "right") - 1
    per_level, most = np.zeros(levels), np.zeros(levels)
    np.maximum.at(per_level, owner, load)
    np.maximum.at(most, level[level >= 0], size[level >= 0])
    compact = np.where(link >= 0, np.searchsorted(used, link), len(used))
    even = _even(src, dst, size, level, layout.ranks) and all(
        np.allclose(load[owner == index], per_level[index]) for index in range(levels)
    )
    alike = even and bool(np.all(level == level[0]))
    return Lanes(level, compact, used, load, per_level, most, even, alike)


def _even(src: Ints, dst: Ints, size: Floats, level: Ints, ranks: int) -> bool:
    """Whether every rank sends one message and receives one, all of one size."""
    each = np.ones(ranks, np.int64)
    return (
        len(src) == ranks
        and bool(np.all(size == size[0]))
        and np.array_equal(np.bincount(src, minlength=ranks), each)
        and np.array_equal(np.bincount(dst, minlength=ranks), each)
    )


def busiest(pattern: Pattern, levels: int) -> Floats:
    """Chunks on the busiest link of each level, over the whole program."""
    total = np.zeros(pattern.links)
    for step in pattern.steps:
        total[step.lanes.used] += step.lanes.load
    found = np.zeros(levels)
    np.maximum.at(found, pattern.level_of, total)
    return found


def sent(pattern: Pattern) -> Ints:
    """Chunks that each rank of the group sends, over the whole program [ranks]."""
    total = np.zeros(pattern.ranks, np.int64)
    for step in pattern.steps:
        np.add.at(total, step.src, step.size)
    return total
