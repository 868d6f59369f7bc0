"""What might carry out a collective: single algorithms, and hierarchies over levels of the machine."""

from __future__ import annotations

import math
from typing import NamedTuple

from commplan.collectives import registry
from commplan.collectives.program import KINDS
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.schedule import Axis, Backend, Collective, CollectiveKind, Schedule
from commplan.topology import Topology

NATIVE = Algorithm("native")
MOST_RANKS = 256  # of one program: beyond that rounds cost more than they save
# Kinds that cut or join in the order of their axes, so that levels have one order.
ORDERED: tuple[CollectiveKind, ...] = ("reduce_scatter", "all_gather")
# What is taken of ways that are equally fast: neighbours only, then few rounds.
SIMPLICITY = ("ring", "recursive_doubling", "halving_doubling", "bruck", "binomial_tree", "chain")
PIECES = (16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)  # bytes of a message, where it is cut
FEW = PIECES[1::3]  # for a first comparison of algorithms


def pieces(nbytes: int) -> list[int]:
    """Sizes of messages that a buffer of `nbytes` may be cut into."""
    return [size for size in PIECES if nbytes // 1024 < size < nbytes]


class HierarchyLevel(NamedTuple):
    """One level of a hierarchy: its key (an axis, or a level that one axis spans), ranks, and the algorithm
    that the plan pins there, if any."""

    key: str
    ranks: int
    pinned: str | None = None


def flat(kind: CollectiveKind, ranks: int) -> tuple[Algorithm, ...]:
    """`native`, and all chunk programs for `kind`, the simplest first."""
    if kind not in KINDS or not 1 < ranks <= MOST_RANKS:
        return (NATIVE,)
    known = registry.algorithms(kind)
    names = sorted(known, key=lambda name: SIMPLICITY.index(name) if name in SIMPLICITY else len(SIMPLICITY))
    return (NATIVE, *map(Algorithm, names))


def crossed_levels(
    op: Collective, schedule: Schedule, topology: Topology | None
) -> tuple[HierarchyLevel, ...]:
    """The levels that `op` crosses, innermost first; none where it lies on one, or lies unevenly.

    Several axes: one for each axis, where each lies on a level of its own. One axis: one for each level that
    it is spread over, where it fills them.
    """
    axes = [axis for axis in schedule.axes if axis.name in op.axes and axis.size > 1]
    if topology is None or not axes or len(axes) < len(op.axes):
        return ()
    if len(axes) == 1:
        return _within(axes[0], topology)
    if any(len(axis.levels) != 1 for axis in axes) or len({axis.level for axis in axes}) < len(axes):
        return ()
    order = [level.name for level in topology.levels]
    inner_first = sorted(axes, key=lambda axis: order.index(axis.level or ""))
    return tuple(HierarchyLevel(axis.name, axis.size) for axis in inner_first)


def _within(axis: Axis, topology: Topology) -> tuple[HierarchyLevel, ...]:
    """The levels that one axis is spread over, where it fills them; in whatever order it counts."""
    order = [level.name for level in topology.levels]
    spreads = sorted((s for s in axis.levels if s.count > 1), key=lambda spread: order.index(spread.level))
    full = math.prod(spread.count for spread in spreads) == axis.size
    once = len({spread.level for spread in spreads}) == len(spreads)
    crossed_levels = tuple(HierarchyLevel(spread.level, spread.count) for spread in spreads)
    return crossed_levels if len(crossed_levels) > 1 and full and once else ()


def pinned_levels(op: Collective, schedule: Schedule) -> tuple[HierarchyLevel, ...]:
    """The levels that the plan or an earlier pass has written, with the algorithms written there."""
    axes = {axis.name: axis.size for axis in schedule.axes}
    spreads = {s.level: s.count for axis in schedule.axes if axis.name in op.axes for s in axis.levels}
    crossed_levels: list[HierarchyLevel] = []
    for arg in op.algorithm.args:
        key = arg.key or str(arg.value)
        ranks = axes[key] if key in op.axes else spreads.get(key, 1)
        crossed_levels.append(HierarchyLevel(key, ranks, str(arg.value) if arg.key else None))
    return tuple(crossed_levels)


def menus(kind: CollectiveKind, ladder: tuple[HierarchyLevel, ...]) -> tuple[tuple[str, ...], ...]:
    """For each level the programs that may carry it out.

    Of an all-reduce the levels inside scatter and gather, and only the outermost reduces at once.
    """
    result: list[tuple[str, ...]] = []
    for index, rung in enumerate(ladder):
        if rung.pinned is not None:
            result.append((rung.pinned,))
            continue
        inside = kind == "all_reduce" and index < len(ladder) - 1
        part = "reduce_scatter" if inside else kind
        names = registry.algorithms(part) if part in KINDS else ()
        if inside:
            names = tuple(name for name in names if registry.supports(name, "all_gather"))
        result.append(names if rung.ranks <= MOST_RANKS else ())
    return tuple(result)


def default_per_level(menus: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Rings where they may be, else the first of each menu; () where a level has none."""
    return tuple("ring" if "ring" in menu else menu[0] for menu in menus) if all(menus) else ()


def hierarchy(ladder: tuple[HierarchyLevel, ...], names: tuple[str, ...]) -> Algorithm:
    """`hierarchical(gpu = ring, node = halving_doubling)`."""
    levels = zip(ladder, names, strict=True)
    return Algorithm("hierarchical", tuple(Arg(name, rung.key) for rung, name in levels))


def as_one(kind: CollectiveKind, algorithm: Algorithm, backend: Backend, op: Collective) -> bool:
    """Whether a hierarchy stays one operation, its levels pipelined against each other.

    Levels of one axis have no name in JAX and always do. Levels that are axes are one operation each in JAX;
    under MPI they are one program, unless a level is left to the backend or values travel narrower than they
    are added, which is done level by level.
    """
    keys = [key for key, _ in algorithm.levels]
    if any(key not in op.axes for key in keys):
        return True
    native = any(arg.key is not None and arg.value == "native" for arg in algorithm.args)
    return backend == "mpi" and kind in KINDS and not travels_narrow(op) and not native


def travels_narrow(op: Collective) -> bool:
    """Whether values are asked to travel in another type than they are added in."""
    return op.hints.wire is not None or op.hints.accumulate is not None
