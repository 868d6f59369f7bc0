"""Selects the implementation of a collective of a schedule: a chunk program, levels, or a native collective.

`lowering/jax` and the audit use `under_xla`, so they agree on the collectives of a step. `lowering/mpi` uses
`program_named`. Chunk programs are proved before they are returned.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from commplan.collectives import layout, registry
from commplan.collectives.hierarchical import NATIVE
from commplan.collectives.program import ChunkProgram, Ints, Kind
from commplan.collectives.transform import permute_ranks
from commplan.diagnostics import CommplanError, fail
from commplan.ir.collective_kinds import ROOTED
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Collective, CollectiveKind, Leaf, Schedule, Spread
from commplan.verify.programs.proof import prove


class HierarchyLevel(NamedTuple):
    """One level of a hierarchical collective.

    Attributes:
        algorithm: The name of the algorithm that runs at this level.
        ranks: The number of ranks in each group of the level.
        stride: The distance between these ranks, counted row-major over the axes of the collective.
        axis: The axis that is this level; None if the level is only a part of an axis.
    """

    algorithm: str
    ranks: int
    stride: int
    axis: str | None

    def place(self, rank: Any) -> Any:
        """The index of `rank`, a number or an array, in its group."""
        return rank // self.stride % self.ranks


def spreads(schedule: Schedule) -> dict[str, tuple[Spread, ...]]:
    """The levels of the topology that each axis spans, by axis name; empty tuples without a topology."""
    return {axis.name: axis.levels for axis in schedule.mesh_axes}


def hierarchy_of(
    algorithm: Algorithm,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
) -> tuple[HierarchyLevel, ...]:
    """The levels of a `hierarchical` algorithm over `axes`, in the order of the algorithm: innermost first.

    The names of the levels are either those of all `axes`, or, if the collective has one axis, those of the
    levels of the topology that the axis spans. Other algorithms have no levels, and the result is empty.

    Args:
        algorithm: The algorithm.
        axes: The axes of the collective.
        sizes: The sizes of all axes.
        spread: The levels of the topology that each axis spans; see `spreads`.

    Raises:
        CommplanError: CP0821 if the levels of the algorithm are not the levels of the axes.
    """
    if not algorithm.levels:
        return ()
    names = [name for name, _ in algorithm.levels]
    total = math.prod(sizes[axis] for axis in axes)
    counts = {axis: sizes[axis] for axis in axes}  # ranks of each level, the major one first
    if len(axes) == 1 and axes[0] not in names:
        counts = {part.level: part.count for part in reversed(spread.get(axes[0], ()))}
    if sorted(names) != sorted(counts) or math.prod(counts.values()) != total:
        message = f"`via {algorithm}` does not match the levels of the {total} ranks of {', '.join(axes)}"
        listed = ", ".join(f"{name} of {count}" for name, count in counts.items())
        fail("CP0821", message, f"the levels are: {listed or 'none'}")
    strides = dict[str, int]()
    for name in reversed(counts):
        strides[name] = math.prod(counts[later] for later in strides)
    return tuple(
        HierarchyLevel(level.name, counts[name], strides[name], name if name in axes else None)
        for name, level in algorithm.levels
    )


def by_level(op: Collective, levels: Sequence[HierarchyLevel]) -> list[tuple[Kind, HierarchyLevel]]:
    """The collectives that `op` consists of, in the order in which they run, each with its level.

    Backends call this if they run some levels natively. Kinds are:

    - An all-reduce with a sum is scattered from the innermost level outwards, reduced at the outermost level
      and gathered back inwards. Each level moves only a part of the bytes of the level inside it.
    - An all-reduce with a maximum or minimum, which `lax` cannot scatter, moves all bytes at each level.
    - A reduce-scatter runs from the innermost level outwards, an all-gather from the outermost level inwards.
    - A broadcast runs from the outermost level inwards. After each level, every group of the next level has
      one rank with the data.

    Args:
        op: The collective. A `reduce` is not supported, because backends run it whole.
        levels: The levels of `op`, innermost first; at least one.
    """
    *inner, outer = levels
    match op.kind:
        case "reduce_scatter":
            return [("reduce_scatter", level) for level in levels]
        case "broadcast" | "all_gather" as kind:
            return [(kind, level) for level in reversed(levels)]
        case _ if op.op == "sum":
            scattered: list[tuple[Kind, HierarchyLevel]] = [("reduce_scatter", level) for level in inner]
            return [*scattered, ("all_reduce", outer), *(("all_gather", level) for level in reversed(inner))]
        case _:
            return [("all_reduce", level) for level in levels]


def for_scalar(op: Collective) -> Collective | None:
    """The collective that runs for a scalar leaf of the operand of `op`; None if none is needed.

    A scalar of a tree is never split. If other leaves are reduce-scattered, the scalar is all-reduced. An
    all-gather does not change a scalar. All other collectives treat a scalar as any leaf.
    """
    if op.kind == "reduce_scatter":
        return replace(op, kind="all_reduce", algorithm=registry.scalar_algorithm(op.algorithm))
    return None if op.kind == "all_gather" else op


def on_leaf(op: Collective, leaf: Leaf, ways: int, *, is_array: bool) -> tuple[Collective, int] | None:
    """The collective that runs for one leaf, and the number of elements of each rank's operand.

    Args:
        op: The collective.
        leaf: The leaf of the operand on one rank, before padding.
        ways: The number of ranks of the collective.
        is_array: Whether the operand is an array, whose leading dimension is scattered. A leaf of a tree is
            flattened before it is scattered.

    Returns:
        The collective and the number of elements, or None if no collective is needed: for a leaf without
        elements, and for the all-gather of a scalar. For a reduce-scatter the number includes padding, which
        makes the scattered dimension a multiple of `ways`.
    """
    if not leaf.size:
        return None
    if not leaf.shape:
        scalar = for_scalar(op)
        return None if scalar is None else (scalar, 1)
    rows = leaf.shape[0] if is_array else leaf.size
    padded = -(-rows // ways) * ways if op.kind == "reduce_scatter" else rows
    return op, leaf.size // rows * padded


def native_kind(op: Collective) -> CollectiveKind:
    """The kind of XLA's collective for a native `op`. XLA has no reduction to one rank."""
    return "all_reduce" if op.kind == "reduce" else op.kind


def under_xla(
    op: Collective,
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
    nbytes: int,
    *,
    is_divisible: bool,
    file: str = "",
) -> ChunkProgram | tuple[HierarchyLevel, ...] | None:
    """The implementation of `op` under XLA: the lowering runs it, and the audit lists its collectives.

    Args:
        op: The collective.
        sizes: The sizes of all axes.
        spread: The levels of the topology that each axis spans; see `spreads`.
        nbytes: Bytes of the whole buffer on one rank: of the result for an all-gather, else of the operand.
        is_divisible: Whether levels can reduce the operand in parts: False for scalars and booleans.
        file: The plan's file, for errors.

    Returns:
        One of:

        - a chunk program;
        - the levels that run one after the other (see `by_level`): two or more, at least one of them native;
        - None for one native collective of kind `native_kind(op)` over all axes of `op`.

    Raises:
        CommplanError: See `program_of`.
    """
    program = program_of(op, sizes, spread, nbytes, file)
    if program is not None:
        return program
    hierarchy = hierarchy_of(op.algorithm, op.axes, sizes, spread)
    is_extreme = op.kind == "all_reduce" and op.op != "sum" and is_plain(hierarchy)
    # One native collective over all axes gives the same result, and `lax` cannot run these by level.
    is_whole = op.kind == "reduce" or is_extreme or (op.kind == "all_reduce" and not is_divisible)
    return None if len(hierarchy) < 2 or is_whole else hierarchy


def is_plain(hierarchy: Sequence[HierarchyLevel]) -> bool:
    """Whether every level is a whole axis, and native. True for no levels."""
    return all(level.axis is not None and level.algorithm == NATIVE for level in hierarchy)


def divisor(op: Collective, hierarchy: Sequence[HierarchyLevel]) -> int:
    """If `op` runs level by level, its operand is padded to a multiple of this number of elements."""
    is_scattered = op.kind == "all_reduce" and op.op == "sum"
    return math.prod(level.ranks for level in hierarchy[:-1]) if is_scattered else 1


def program_of(
    op: Collective,
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
    nbytes: int,
    file: str = "",
) -> ChunkProgram | None:
    """The proved chunk program of `op`; None if the backend runs `op`, or a level of it, natively.

    Ranks are counted row-major over `op.axes`, the first axis major. `op.hints.chunk` cuts the data into
    slices (`collectives.layout.slices`).

    Args:
        op: The collective.
        sizes: The sizes of all axes.
        spread: The levels of the topology that each axis spans; see `spreads`.
        nbytes: Bytes of the whole buffer on one rank: of the result for an all-gather, else of the operand.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0740 to CP0749, with a counter-example, if the program does not implement its
            collective; and the errors of `hierarchy_of` and `registry.program`.
    """
    if op.algorithm.name == NATIVE:
        return None
    ranks = math.prod(sizes[axis] for axis in op.axes)
    with _errors_at(op, file):
        hierarchy = hierarchy_of(op.algorithm, op.axes, sizes, spread)
        if any(level.algorithm == NATIVE for level in hierarchy):
            return None
        kind = cast("Kind", op.kind)  # `registry.program` rejects a kind without programs
        return program_named(op.algorithm.name, kind, ranks, op.root or 0, nbytes, op.hints.chunk, hierarchy)


def program_at(
    level: HierarchyLevel, kind: Kind, op: Collective, nbytes: int, file: str = ""
) -> ChunkProgram:
    """The proved chunk program of `kind` in one group of a level of `op`.

    Args:
        level: The level; it is not native.
        kind: The collective that the level runs; see `by_level`.
        op: The collective that the level is part of.
        nbytes: Bytes of the whole buffer of this level, as in `program_of`.
        file: The plan's file, for errors.

    Raises:
        CommplanError: See `program_of`.
    """
    root = level.place(op.root or 0)
    with _errors_at(op, file):
        return program_named(level.algorithm, kind, level.ranks, root, nbytes, op.hints.chunk)


@contextmanager
def _errors_at(op: Collective, file: str) -> Generator[None]:
    """A context that sets the location of `CommplanError`s to the plan line of `op` in `file`."""
    try:
        yield
    except CommplanError as error:
        diagnostics = (replace(diagnostic, span=op.span, file=file) for diagnostic in error.diagnostics)
        raise CommplanError(*diagnostics) from None


def program_named(
    name: str,
    kind: Kind,
    ranks: int,
    root: int,
    nbytes: int,
    chunk: int | None,
    levels: tuple[HierarchyLevel, ...] = (),
) -> ChunkProgram:
    """The proved chunk program of algorithm `name`.

    Args:
        name: The name of the algorithm.
        kind: The collective.
        ranks: The number of ranks.
        root: The rank of the root; ignored for kinds without one.
        nbytes: Bytes of the whole buffer, as in `program_of`.
        chunk: Bytes of a message, to which chunks are cut; None sends chunks whole.
        levels: The levels of a hierarchical algorithm. One level is the same as its algorithm; empty for
            other algorithms.

    Raises:
        CommplanError: See `program_of`. The errors have no location.
    """
    root = root if kind in ROOTED else 0
    if len(levels) == 1:
        name, levels = levels[0].algorithm, ()
    whole = _proved(name, levels, kind, ranks, root, 1)
    slices = layout.slices(whole.chunks, nbytes, chunk) if whole.rounds else 1
    return whole if slices == 1 else _proved(name, levels, kind, ranks, root, slices)


def members(level: HierarchyLevel, ranks: int) -> Ints:
    """The ranks of each group of a level of a collective with `ranks` ranks; int64[groups, level.ranks]."""
    rank = np.arange(ranks, dtype=np.int64)
    return rank[level.place(rank) == 0][:, None] + np.arange(level.ranks) * level.stride


@lru_cache(maxsize=256)
def _proved(
    name: str, levels: tuple[HierarchyLevel, ...], kind: Kind, ranks: int, root: int, slices: int
) -> ChunkProgram:
    """Build and prove a program. Cached, because proofs are slow and programs repeat."""
    if levels:
        # `registry.hierarchical` numbers ranks such that those of the innermost level are adjacent.
        numbers, stride = np.zeros(ranks, np.int64), 1
        for level in levels:
            numbers += level.place(np.arange(ranks, dtype=np.int64)) * stride
            stride *= level.ranks
        pairs = [(level.algorithm, level.ranks) for level in levels]
        program = permute_ranks(
            registry.hierarchical(pairs, kind, root=int(numbers[root]), slices=slices), numbers
        )
    else:
        program = registry.program(name, kind, ranks, root=root, slices=slices)
    problems = prove(program)
    if problems:
        raise CommplanError(problems[0].diagnostic(f"`via {program.name}`, {kind} over {ranks} ranks"))
    return program
