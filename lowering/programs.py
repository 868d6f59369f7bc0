"""Which chunk program carries out a collective of a schedule: one answer for JAX and MPI."""

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
from commplan.collectives.program import ROOTED, ChunkProgram, Ints, Kind
from commplan.collectives.transform import permute_ranks
from commplan.diagnostics import CommplanError, fail
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Collective, Schedule, Spread
from commplan.verify.programs.proof import prove


class ProgramLevel(NamedTuple):
    """One level of a hierarchical collective.

    ranks: how many there are in each of its groups. stride: how far apart they stand among all the ranks of
    the collective, counted row-major over its axes. axis: the axis that the level is, None where it is only
    a part of one.
    """

    algorithm: str
    ranks: int
    stride: int
    axis: str | None

    def place(self, rank: Any) -> Any:
        """The place within its group of `rank`, a number or an array of them."""
        return rank // self.stride % self.ranks


def spreads(schedule: Schedule) -> dict[str, tuple[Spread, ...]]:
    """The levels of the topology that each axis spans, innermost first."""
    return {axis.name: axis.levels for axis in schedule.mesh_axes}


def levels(
    algorithm: Algorithm,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
) -> tuple[ProgramLevel, ...]:
    """The levels of a `hierarchical` algorithm over `axes`, innermost first; none of any other.

    sizes: the ranks along each axis; spread: the levels that each axis spans. Raises `CommplanError` CP0821
    where the levels are not all there is of the axes.
    """
    if not algorithm.levels:
        return ()
    names, ways = [name for name, _ in algorithm.levels], math.prod(sizes[axis] for axis in axes)
    ranks = {axis: sizes[axis] for axis in axes}
    if len(axes) == 1 and axes[0] not in names:
        ranks = {each.level: each.count for each in reversed(spread.get(axes[0], ()))}
    if sorted(names) != sorted(ranks) or math.prod(ranks.values()) != ways:
        message = f"`via {algorithm}` does not cut the {ways} ranks of {', '.join(axes)} into levels"
        note = f"there are: {', '.join(f'{name} of {count}' for name, count in ranks.items()) or 'none'}"
        fail("CP0821", message, note)
    strides = dict[str, int]()
    for name in reversed(ranks):
        strides[name] = math.prod(ranks[later] for later in strides)
    return tuple(
        ProgramLevel(how.name, ranks[name], strides[name], name if name in axes else None)
        for name, how in algorithm.levels
    )


def by_level(op: Collective, own: Sequence[ProgramLevel]) -> list[tuple[Kind, ProgramLevel]]:
    """What `op` is at its levels `own`, in order, where a backend carries out some of them itself.

    A sum is scattered inwards, reduced outermost and gathered: each level outside moves a part of the bytes.
    A maximum or minimum, which `lax` does not scatter, moves all of them at each level. After each level of a
    broadcast, outermost first, every group inside has a rank that knows.
    """
    *inner, outer = own
    match op.kind:
        case "reduce_scatter":
            return [("reduce_scatter", level) for level in own]
        case "broadcast" | "all_gather" as kind:
            return [(kind, level) for level in reversed(own)]
        case _ if op.op == "sum":
            scattered: list[tuple[Kind, ProgramLevel]] = [("reduce_scatter", level) for level in inner]
            return [*scattered, ("all_reduce", outer), *(("all_gather", level) for level in reversed(inner))]
        case _:
            return [("all_reduce", level) for level in own]


def program_of(
    op: Collective,
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
    nbytes: int,
    file: str = "",
) -> ChunkProgram | None:
    """The program that carries out `op`, proved; None where the backend does so itself, or a level of it.

    Its ranks are those along `op.axes`, counted row-major, first named major. nbytes: of the whole buffer,
    which for an all-gather is that of the result. `op.hints.chunk` cuts what moves at once into slices
    (`collectives.layout.slices`). Raises `CommplanError` with the counter-example
    (CP0740 to CP0749) for a program that does not do what its collective promises, and as `levels` and
    `registry.program` do.
    """
    if op.algorithm.name == NATIVE:
        return None
    ranks = math.prod(sizes[axis] for axis in op.axes)
    with _named_line(op, file):
        own = levels(op.algorithm, op.axes, sizes, spread)
        if any(level.algorithm == NATIVE for level in own):
            return None
        kind = cast("Kind", op.kind)  # one that has no programs is refused there
        return program_named(op.algorithm.name, kind, ranks, op.root or 0, nbytes, op.hints.chunk, own)


def program_at(level: ProgramLevel, kind: Kind, op: Collective, nbytes: int, file: str = "") -> ChunkProgram:
    """The program of one level of `op`, proved, cut into slices as `program_of` says, and raising as it does.

    kind: what is to be done at that level, on `nbytes`.
    """
    root = level.place(op.root or 0)
    with _named_line(op, file):
        return program_named(level.algorithm, kind, level.ranks, root, nbytes, op.hints.chunk)


@contextmanager
def _named_line(op: Collective, file: str) -> Generator[None]:
    """Whatever is wrong is wrong at the plan line of `op`."""
    try:
        yield
    except CommplanError as error:
        own = (replace(each, span=op.span, file=file) for each in error.diagnostics)
        raise CommplanError(*own) from None


def program_named(
    name: str,
    kind: Kind,
    ranks: int,
    root: int,
    nbytes: int,
    chunk: int | None,
    own: tuple[ProgramLevel, ...] = (),
) -> ChunkProgram:
    """The program of algorithm `name` with levels `own`, proved, cut into slices for messages of `chunk`
    bytes as `program_of` says, and raising as it does. root: where `kind` has one."""
    root = root if kind in ROOTED else 0
    if len(own) == 1:
        name, own = own[0].algorithm, ()
    whole = _proved(name, own, kind, ranks, root, 1)
    slices = layout.slices(whole.chunks, nbytes, chunk) if whole.rounds else 1
    return whole if slices == 1 else _proved(name, own, kind, ranks, root, slices)


def members(level: ProgramLevel, ranks: int) -> Ints:
    """The ranks of each group of a level, of `ranks` in all; [groups, ranks of the level]."""
    rank = np.arange(ranks, dtype=np.int64)
    return rank[level.place(rank) == 0][:, None] + np.arange(level.ranks) * level.stride


@lru_cache(maxsize=256)
def _proved(
    name: str, own: tuple[ProgramLevel, ...], kind: Kind, ranks: int, root: int, slices: int
) -> ChunkProgram:
    if own:
        # The innermost level counts fastest.
        place, step = np.zeros(ranks, np.int64), 1
        for level in own:
            place += level.place(np.arange(ranks, dtype=np.int64)) * step
            step *= level.ranks
        pairs = [(level.algorithm, level.ranks) for level in own]
        program = permute_ranks(
            registry.hierarchical(pairs, kind, root=int(place[root]), slices=slices), place
        )
    else:
        program = registry.program(name, kind, ranks, root=root, slices=slices)
    wrong = prove(program)
    if wrong:
        raise CommplanError(wrong[0].diagnostic(f"`via {program.name}`, {kind} over {ranks} ranks"))
    return program
