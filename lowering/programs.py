"""How a collective of a schedule is implemented: its chunk program, its levels, or a native collective."""

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
        algorithm: The algorithm of the level.
        ranks: The number of ranks in each of its groups.
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
    """The levels of the topology that each axis spans, innermost first."""
    return {axis.name: axis.levels for axis in schedule.mesh_axes}


def levels(
    algorithm: Algorithm,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
) -> tuple[HierarchyLevel, ...]:
    """The levels of a `hierarchical` algorithm over `axes`, innermost first; empty for other algorithms.

    Args:
        algorithm: The algorithm.
        axes: The axes of the collective.
        sizes: The sizes of all axes.
        spread: The levels of the topology that each axis spans.

    Raises:
        CommplanError: CP0821 if the levels of the algorithm are not the levels of the axes.
    """
    if not algorithm.levels:
        return ()
    names = [name for name, _ in algorithm.levels]
    ways = math.prod(sizes[axis] for axis in axes)
    ranks = {axis: sizes[axis] for axis in axes}
    if len(axes) == 1 and axes[0] not in names:
        ranks = {each.level: each.count for each in reversed(spread.get(axes[0], ()))}
    if sorted(names) != sorted(ranks) or math.prod(ranks.values()) != ways:
        message = f"`via {algorithm}` does not match the levels of the {ways} ranks of {', '.join(axes)}"
        note = f"the levels are: {', '.join(f'{name} of {count}' for name, count in ranks.items()) or 'none'}"
        fail("CP0821", message, note)
    strides = dict[str, int]()
    for name in reversed(ranks):
        strides[name] = math.prod(ranks[later] for later in strides)
    return tuple(
        HierarchyLevel(level.name, ranks[name], strides[name], name if name in axes else None)
        for name, level in algorithm.levels
    )


def by_level(op: Collective, levels: Sequence[HierarchyLevel]) -> list[tuple[Kind, HierarchyLevel]]:
    """The collectives that `op` consists of, one per level in order, if a backend runs some levels natively.

    A sum is scattered from the inside out, reduced at the outermost level and gathered back: each level moves
    only a part of the bytes of the level inside it. A maximum or minimum, which `lax` cannot scatter, moves
    all bytes at each level. A broadcast runs from the outermost level in: after each level every inner group
    has a rank with data.
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

    A scalar of a tree is never split. It is reduced where other leaves are scattered, and not gathered.
    """
    if op.kind == "reduce_scatter":
        return replace(op, kind="all_reduce", algorithm=registry.scalar_algorithm(op.algorithm))
    return None if op.kind == "all_gather" else op


def on_leaf(op: Collective, leaf: Leaf, ways: int, *, is_array: bool) -> tuple[Collective, int] | None:
    """The collective that runs for one leaf, and the number of elements of each rank's operand.

    Returns None if no collective is needed. The operand of a reduce-scatter is padded: the rows of an array
    (`is_array`), and the flattened leaves of a tree.
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
        spread: The levels of the topology that each axis spans.
        nbytes: Bytes of the whole buffer: for an all-gather, of the result.
        is_divisible: Whether levels can reduce the operand in parts: False for scalars and booleans.
        file: The plan's file, for errors.

    Returns:
        A chunk program; or the levels that run one after the other (`by_level`), of which at least one is
        native; or None for one native collective of kind `native_kind(op)`.

    Raises:
        CommplanError: See `program_of`.
    """
    program = program_of(op, sizes, spread, nbytes, file)
    if program is not None:
        return program
    hierarchy = levels(op.algorithm, op.axes, sizes, spread)
    is_extreme = op.kind == "all_reduce" and op.op != "sum" and is_plain(hierarchy)
    is_whole = op.kind == "reduce" or is_extreme or (op.kind == "all_reduce" and not is_divisible)
    return None if len(hierarchy) < 2 or is_whole else hierarchy


def is_plain(hierarchy: Sequence[HierarchyLevel]) -> bool:
    """Whether every level is a whole axis, and native."""
    return all(level.axis is not None and level.algorithm == NATIVE for level in hierarchy)


def divisor(op: Collective, hierarchy: Sequence[HierarchyLevel]) -> int:
    """The operand of `op`, run level by level, is padded to a multiple of this number of elements."""
    is_scattered = op.kind == "all_reduce" and op.op == "sum"
    return math.prod(level.ranks for level in hierarchy[:-1]) if is_scattered else 1


def program_of(
    op: Collective,
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
    nbytes: int,
    file: str = "",
) -> ChunkProgram | None:
    """The program of `op`, proved; None if the backend runs `op`, or a level of it, natively.

    Ranks are counted row-major over `op.axes`, the first axis major. `op.hints.chunk` cuts the data into
    slices (`collectives.layout.slices`).

    Args:
        op: The collective.
        sizes: The sizes of all axes.
        spread: The levels of the topology that each axis spans.
        nbytes: Bytes of the whole buffer: for an all-gather, of the result.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0740 to CP0749, with a counter-example, if the program does not implement its
            collective; and the errors of `levels` and `registry.program`.
    """
    if op.algorithm.name == NATIVE:
        return None
    ranks = math.prod(sizes[axis] for axis in op.axes)
    with _errors_at(op, file):
        levels_of_op = levels(op.algorithm, op.axes, sizes, spread)
        if any(level.algorithm == NATIVE for level in levels_of_op):
            return None
        kind = cast("Kind", op.kind)  # `registry.program` rejects a kind without programs
        return program_named(
            op.algorithm.name, kind, ranks, op.root or 0, nbytes, op.hints.chunk, levels_of_op
        )


def program_at(
    level: HierarchyLevel, kind: Kind, op: Collective, nbytes: int, file: str = ""
) -> ChunkProgram:
    """The program for `kind` at one level of `op` on `nbytes` bytes; see `program_of`."""
    root = level.place(op.root or 0)
    with _errors_at(op, file):
        return program_named(level.algorithm, kind, level.ranks, root, nbytes, op.hints.chunk)


@contextmanager
def _errors_at(op: Collective, file: str) -> Generator[None]:
    """A context that adds the plan line of `op` to errors."""
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
    """The program of algorithm `name`, proved and cut into slices for messages of `chunk` bytes.

    See `program_of`. `root` is ignored for kinds without one.
    """
    root = root if kind in ROOTED else 0
    if len(levels) == 1:
        name, levels = levels[0].algorithm, ()
    whole = _proved(name, levels, kind, ranks, root, 1)
    slices = layout.slices(whole.chunks, nbytes, chunk) if whole.rounds else 1
    return whole if slices == 1 else _proved(name, levels, kind, ranks, root, slices)


def members(level: HierarchyLevel, ranks: int) -> Ints:
    """The ranks of each group of a level, out of `ranks`; [groups, ranks of the level]."""
    rank = np.arange(ranks, dtype=np.int64)
    return rank[level.place(rank) == 0][:, None] + np.arange(level.ranks) * level.stride


@lru_cache(maxsize=256)
def _proved(
    name: str, levels: tuple[HierarchyLevel, ...], kind: Kind, ranks: int, root: int, slices: int
) -> ChunkProgram:
    if levels:
        # Ranks of the innermost level are adjacent.
        places, step = np.zeros(ranks, np.int64), 1
        for level in levels:
            places += level.place(np.arange(ranks, dtype=np.int64)) * step
            step *= level.ranks
        pairs = [(level.algorithm, level.ranks) for level in levels]
        program = permute_ranks(
            registry.hierarchical(pairs, kind, root=int(places[root]), slices=slices), places
        )
    else:
        program = registry.program(name, kind, ranks, root=root, slices=slices)
    problems = prove(program)
    if problems:
        raise CommplanError(problems[0].diagnostic(f"`via {program.name}`, {kind} over {ranks} ranks"))
    return program
