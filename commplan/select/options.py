"""Lists the candidates for a collective: single algorithms, and hierarchies over levels of the topology.

`algorithm_search` predicts the time of these candidates, and passes use the predicates of hierarchies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from commplan.collectives import registry
from commplan.collectives.program import KINDS
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.schedule import Axis, Backend, Collective, CollectiveKind, Schedule
from commplan.topology import Topology

NATIVE = Algorithm("native")  # the backend's own collective
MOST_RANKS = 256  # maximum number of ranks of one program; with more ranks it has too many rounds
# The order of preference among equally fast algorithms: neighbors only, then few rounds.
SIMPLICITY = ("ring", "recursive_doubling", "halving_doubling", "bruck", "binomial_tree", "chain")
# The candidate message sizes in bytes, if chunks are sliced.
PIECES = (16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)
FEW = PIECES[1::3]  # the sizes for a first comparison of algorithms: 32 and 256 KiB


def pieces(nbytes: int) -> list[int]:
    """The candidate message sizes for a buffer of `nbytes`: those with 2 to 1024 messages."""
    return [size for size in PIECES if nbytes // 1024 < size < nbytes]


class CrossedLevel(NamedTuple):
    """One level of a hierarchy.

    Attributes:
        key: The name of an axis, or of a level of the topology that the only axis spans.
        ranks: The number of ranks at the level.
        pinned: The algorithm that the plan specifies for the level; None if it does not.
    """

    key: str
    ranks: int
    pinned: str | None = None


def flat(kind: CollectiveKind, ranks: int) -> tuple[Algorithm, ...]:
    """`native` and all chunk programs for `kind`, the simplest first.

    Only `native` for one rank, for more than `MOST_RANKS`, and for kinds without chunk programs.
    """
    if kind not in KINDS or not 1 < ranks <= MOST_RANKS:
        return (NATIVE,)
    supported = registry.algorithms(kind)
    names = sorted(
        supported, key=lambda name: SIMPLICITY.index(name) if name in SIMPLICITY else len(SIMPLICITY)
    )
    return (NATIVE, *map(Algorithm, names))


def crossed_levels(op: Collective, schedule: Schedule, topology: Topology | None) -> tuple[CrossedLevel, ...]:
    """The levels of a hierarchy for `op`, innermost first.

    With several axes, each axis is a level. With a single axis, each level of the topology that it spans is
    one.

    Returns:
        The levels. Empty without a topology, if an axis of `op` has one rank, if a single axis spans one
        level or does not fill its levels, and if several axes do not map to one level each, all different.
        Empty also for values in blocks, since each level would round them again.
    """
    axes = [axis for axis in schedule.axes if axis.name in op.axes and axis.size > 1]
    if topology is None or not axes or len(axes) < len(op.axes) or op.hints.codec is not None:
        return ()
    if len(axes) == 1:
        return _within(axes[0], topology)
    if any(len(axis.levels) != 1 for axis in axes) or len({axis.level for axis in axes}) < len(axes):
        return ()
    order = [level.name for level in topology.levels]
    inner_first = sorted(axes, key=lambda axis: order.index(axis.level or ""))
    return tuple(CrossedLevel(axis.name, axis.size) for axis in inner_first)


def _within(axis: Axis, topology: Topology) -> tuple[CrossedLevel, ...]:
    """The levels that one axis spans, innermost first; empty if it spans one, or does not fill them."""
    order = [level.name for level in topology.levels]
    spreads = sorted((s for s in axis.levels if s.count > 1), key=lambda spread: order.index(spread.level))
    fills_axis = math.prod(spread.count for spread in spreads) == axis.size
    are_unique = len({spread.level for spread in spreads}) == len(spreads)
    levels = tuple(CrossedLevel(spread.level, spread.count) for spread in spreads)
    return levels if len(levels) > 1 and fills_axis and are_unique else ()


def pinned_levels(op: Collective, schedule: Schedule) -> tuple[CrossedLevel, ...]:
    """The levels that the plan or an earlier pass has specified for `op`, innermost first.

    `CrossedLevel.pinned` is the algorithm that was specified with the level.
    """
    axes = {axis.name: axis.size for axis in schedule.axes}
    spreads = {s.level: s.count for axis in schedule.axes if axis.name in op.axes for s in axis.levels}
    levels: list[CrossedLevel] = []
    for arg in op.algorithm.args:
        key = arg.key or str(arg.value)
        ranks = axes[key] if key in op.axes else spreads.get(key, 1)
        levels.append(CrossedLevel(key, ranks, str(arg.value) if arg.key else None))
    return tuple(levels)


def algorithms_per_level(
    kind: CollectiveKind, levels: tuple[CrossedLevel, ...]
) -> tuple[tuple[str, ...], ...]:
    """For each level, the algorithms that can run it: the pinned one, or all chunk programs for its part.

    The inner levels of an all-reduce scatter and gather; only the outermost level reduces. A level with more
    than `MOST_RANKS` ranks has no chunk program.
    """
    result: list[tuple[str, ...]] = []
    for index, level in enumerate(levels):
        if level.pinned is not None:
            result.append((level.pinned,))
            continue
        is_inner = kind == "all_reduce" and index < len(levels) - 1
        part = "reduce_scatter" if is_inner else kind
        names = registry.algorithms(part) if part in KINDS else ()
        if is_inner:
            names = tuple(name for name in names if registry.supports(name, "all_gather"))
        result.append(names if level.ranks <= MOST_RANKS else ())
    return tuple(result)


def default_per_level(choices: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The default algorithm of each level: a ring, or else the first choice. () if a level has no choice."""
    return tuple("ring" if "ring" in names else names[0] for names in choices) if all(choices) else ()


def hierarchy(levels: tuple[CrossedLevel, ...], names: tuple[str, ...]) -> Algorithm:
    """A hierarchy with `names[i]` at level i, such as `hierarchical(gpu = ring, node = halving_doubling)`."""
    pairs = zip(levels, names, strict=True)
    return Algorithm("hierarchical", tuple(Arg(name, level.key) for level, name in pairs))


def is_one_operation(kind: CollectiveKind, algorithm: Algorithm, backend: Backend, op: Collective) -> bool:
    """Whether a hierarchy is one operation, with pipelined levels, instead of one operation per level.

    Levels of the topology are always one operation, because JAX has no names for them. Levels that are axes
    are separate operations in JAX. Under MPI they are one program, unless a level is native or the stage has
    wire options, which are carried out level by level.

    Args:
        kind: The kind of collective.
        algorithm: The hierarchy.
        backend: The backend.
        op: The collective, for its axes and wire options.
    """
    keys = [key for key, _ in algorithm.levels]
    if any(key not in op.axes for key in keys):
        return True
    has_native = any(arg.key is not None and arg.value == "native" for arg in algorithm.args)
    return backend == "mpi" and kind in KINDS and not has_wire_options(op) and not has_native


def has_wire_options(op: Collective) -> bool:
    """Whether the stage has the option `wire` or `accumulate`.

    These may name the type that the values have already; `Hints.changes` is whether they change it.
    """
    hints = op.hints
    return hints.wire is not None or hints.codec is not None or hints.accumulate is not None
