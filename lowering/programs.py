"""Which chunk program carries out a collective of a schedule: one answer for the oracle, JAX and MPI."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from commplan.collectives import layout, registry
from commplan.collectives.hierarchical import NATIVE
from commplan.collectives.program import Ints, Kind, Program
from commplan.collectives.transform import placed
from commplan.diagnostics import CommplanError, fail
from commplan.ir.schedule import Collective, Schedule, Spread
from commplan.verify.programs import prove


class Level(NamedTuple):
    """One level of a hierarchical collective.

    ranks: how many there are in each of its groups. stride: how far apart they stand among all the ranks of
    the collective, counted row-major over its axes. axis: the axis that the level is, None where it is only
    a part of one.
    """

    algorithm: str
    ranks: int
    stride: int
    axis: str | None


def spreads(schedule: Schedule) -> dict[str, tuple[Spread, ...]]:
    """The levels of the topology that each axis spans, innermost first."""
    return {axis.name: axis.levels for axis in schedule.mesh_axes}


def levels(
    op: Collective, sizes: Mapping[str, int], spread: Mapping[str, tuple[Spread, ...]], file: str = ""
) -> tuple[Level, ...]:
    """The levels of a `hierarchical` algorithm, innermost first; none of any other.

    sizes: the ranks along each axis; spread: the levels that each axis spans. Raises `CommplanError` CP0821
    where the levels are not all there is of the axes.
    """
    found: list[Level] = []
    digits = {axis: (sizes[axis], axis) for axis in op.axes}
    names = [name for name, _ in op.algorithm.levels]
    if len(op.axes) == 1 and op.axes[0] not in names:
        digits = {each.level: (each.count, None) for each in reversed(spread.get(op.axes[0], ()))}
    strides = dict[str, int]()
    for name in reversed(digits):
        strides[name] = math.prod(digits[later][0] for later in strides)
    for name, how in op.algorithm.levels:
        if name not in digits:
            break
        found.append(Level(how.name, digits[name][0], strides[name], digits[name][1]))
    ways = math.prod(sizes[axis] for axis in op.axes)
    if op.algorithm.levels and (
        sorted(names) != sorted(digits) or math.prod(level.ranks for level in found) != ways
    ):
        fail(
            "CP0821",
            f"`via {op.algorithm}` does not cut the {ways} ranks of {', '.join(op.axes)} into levels",
            f"there are: {', '.join(f'{name} of {ranks}' for name, (ranks, _) in digits.items()) or 'none'}",
            span=op.span,
            file=file,
        )
    return tuple(found)


def program_of(
    op: Collective,
    sizes: Mapping[str, int],
    spread: Mapping[str, tuple[Spread, ...]],
    nbytes: int,
    file: str = "",
) -> Program | None:
    """The program that carries out `op`, proved; None where the backend does so itself, or a level of it.

    Its ranks are those along `op.axes`, counted row-major, first named major. nbytes: of the whole buffer,
    which for an all-gather is that of the result. `op.hints.chunk` cuts what moves at once into slices
    (`collectives.layout.slices`). Raises `CommplanError` with the counter-example
    (CP0740 to CP0749) for a program that does not do what its collective promises, and as `levels` and
    `registry.program` do.
    """
    if op.kind == "all_to_all" or op.algorithm.name == NATIVE:
        return None
    ranks = math.prod(sizes[axis] for axis in op.axes)
    own = levels(op, sizes, spread, file)
    if any(level.algorithm == NATIVE for level in own):
        return None
    root = (op.root or 0) if op.kind in ("broadcast", "reduce") else 0
    key = (op.algorithm.name, *own) if len(own) != 1 else (own[0].algorithm,)
    with _named_line(op, file):
        return _sliced(key, op.kind, ranks, root, nbytes, op.hints.chunk)


def program_named(name: str, kind: Kind, ranks: int, root: int, nbytes: int, chunk: int | None) -> Program:
    """The program of algorithm `name`, proved, cut into slices for messages of `chunk` bytes as `program_of`
    says, and raising as it does."""
    return _sliced((name,), kind, ranks, root, nbytes, chunk)


def program_at(
    level: Level, kind: Kind, op: Collective, nbytes: int, root: int = 0, file: str = ""
) -> Program:
    """The program of one level of `op`, proved, cut into slices as `program_of` says, and raising as it does.

    kind: what is to be done at that level, on `nbytes`, from `root`, counted among its ranks.
    """
    with _named_line(op, file):
        return _sliced((level.algorithm,), kind, level.ranks, root, nbytes, op.hints.chunk)


@contextlib.contextmanager
def _named_line(op: Collective, file: str) -> Generator[None]:
    """Whatever is wrong is wrong at the plan line of `op`."""
    try:
        yield
    except CommplanError as error:
        own = (msgspec.structs.replace(each, span=op.span, file=file) for each in error.diagnostics)
        raise CommplanError(*own) from None


def _sliced(
    key: tuple[str | Level, ...], kind: Kind, ranks: int, root: int, nbytes: int, chunk: int | None
) -> Program:
    whole = _proved(key, kind, ranks, root, 1)
    slices = layout.slices(whole.chunks, nbytes, chunk) if whole.rounds else 1
    return whole if slices == 1 else _proved(key, kind, ranks, root, slices)


def members(level: Level, ranks: int) -> Ints:
    """The ranks of each group of a level, of `ranks` in all; [groups, ranks of the level]."""
    rank = np.arange(ranks, dtype=np.int64)
    first = rank[rank // level.stride % level.ranks == 0]
    return first[:, None] + np.arange(level.ranks) * level.stride


def places(own: Sequence[Level], ranks: int) -> Ints:
    """The place of each of the ranks where the innermost level of `own` counts fastest."""
    rank, place, step = np.arange(ranks, dtype=np.int64), np.zeros(ranks, np.int64), 1
    for level in own:
        place += rank // level.stride % level.ranks * step
        step *= level.ranks
    return place


@functools.lru_cache(maxsize=256)
def _proved(key: tuple[str | Level, ...], kind: Kind, ranks: int, root: int, slices: int) -> Program:
    name, *own = key
    by_level = [level for level in own if isinstance(level, Level)]
    if by_level:
        place = places(by_level, ranks)
        pairs = [(level.algorithm, level.ranks) for level in by_level]
        made = placed(registry.hierarchical(pairs, kind, root=int(place[root]), slices=slices), place)
    else:
        made = registry.program(str(name), kind, ranks, root=root, slices=slices)
    wrong = prove(made)
    if wrong:
        raise CommplanError(wrong[0].diagnostic(f"`via {made.name}`, {kind} over {ranks} ranks"))
    return made
