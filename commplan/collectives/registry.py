"""The algorithms there are, found as the files of `commplan.collectives.algorithms`; and programs by name."""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Collection
from fractions import Fraction
from typing import cast

from commplan.collectives import algorithms as algorithm_files
from commplan.collectives.hierarchical import NATIVE, Levels, Stage, composed
from commplan.collectives.hierarchical import stages as _stages
from commplan.collectives.postcondition import targets
from commplan.collectives.program import IN_BLOCKS, KINDS, ROOTED, AlgorithmFile, Kind, Program
from commplan.collectives.transform import pipelined, rooted, tidy
from commplan.diagnostics import did_you_mean, fail
from commplan.ir.hints import Algorithm

TRANSFERS = 2**25  # 4,096 ranks in a ring; half a gigabyte


@functools.cache
def files() -> dict[str, AlgorithmFile]:
    """Every algorithm by its name, in the order of the names."""
    names = sorted(info.name for info in pkgutil.iter_modules(algorithm_files.__path__))
    room = algorithm_files.__name__
    return {name: cast("AlgorithmFile", importlib.import_module(f"{room}.{name}")) for name in names}


def algorithms(kind: Kind | None = None) -> tuple[str, ...]:
    """The names of the algorithms that carry out `kind`, or of all. `hierarchical` and `native`, which are
    no files of rounds, are not among them."""
    if kind is None:
        return tuple(files())
    _known(kind, KINDS, "CP0736", "collective")
    return tuple(name for name, file in files().items() if kind in file.PROGRAMS)


def supports(name: str, kind: Kind) -> bool:
    """Whether there is an algorithm `name`, and it carries out `kind`."""
    return name in files() and kind in files()[name].PROGRAMS


def program(name: str, kind: Kind, n: int, *, root: int = 0, slices: int = 1) -> Program:
    """The program of algorithm `name` for collective `kind` over `n` ranks.

    root: the rank that has, or gets, the whole; only where `kind` has a root. slices: how many parts every
    chunk is cut into, which follow each other through the rounds (see `transform.pipelined`).
    Raises CP0601 (no such algorithm), CP0736 (no such collective), CP0603 (the algorithm does not carry it
    out) and CP0737 (ranks, root or slices that cannot be).

    >>> len(program("ring", "all_reduce", 5).rounds)
    8
    """
    _known(kind, KINDS, "CP0736", "collective")
    _known(name, files(), "CP0601", "algorithm")
    if not supports(name, kind):
        of = ", ".join(f"`{each}`" for each in algorithms(kind))
        fail("CP0603", f"`{name}` does not carry out {kind}", f"{kind} takes {of}")
    check_numbers(kind, n, root, slices)
    _check_large(name, files()[name].formula(kind, n)[0] * n * slices)
    body = files()[name].PROGRAMS[kind](n)
    whole = Program(name, kind, n, body.chunks, tidy(body.rounds), targets=targets(kind, [n]))
    return pipelined(rooted(whole, root), slices)


def formula(name: str, kind: Kind, n: int) -> tuple[int, Fraction]:
    """Rounds, and the share of S that the busiest rank sends or receives, of `program(name, kind, n)`."""
    _known(name, files(), "CP0601", "algorithm")
    return files()[name].formula(kind, n)


def hierarchical(levels: Levels, kind: Kind, *, root: int = 0, slices: int = 1) -> Program:
    """The program over all levels, each an algorithm and its number of ranks, innermost first.

    rank = outer * (inner ranks) + inner. It pipelines as every program does: with slices, one is at an outer
    level while the next is at an inner one. Raises as `program`, and CP0739 where a level does not carry out
    its part or is `native`, of which there are only `stages`.

    >>> len(hierarchical([("ring", 4), ("halving_doubling", 2)], "all_reduce").rounds)
    8
    """
    n = _check_levels(levels, kind, root, slices)
    name = f"hierarchical({', '.join(f'{name}[{size}]' for name, size in levels)})"
    many = 0
    for stage in stages(levels, kind, root=root):
        size = levels[stage.level][1]
        rounds = files()[stage.algorithm].formula(stage.kind, size)[0] if stage.algorithm != NATIVE else 0
        # Blocks of ranks that differ further out lie apart: each is a transfer of its own.
        apart = math.prod(size for _, size in levels[stage.level + 1 :]) if kind in IN_BLOCKS else 1
        many += rounds * n * apart * slices
    _check_large(name, many)
    body = composed(files(), levels, kind, root)
    table = targets(kind, [size for _, size in levels])
    return pipelined(Program(name, kind, n, body.chunks, tidy(body.rounds), root, table), slices)


def stages(levels: Levels, kind: Kind, *, root: int = 0) -> tuple[Stage, ...]:
    """What `hierarchical` is made of: a collective with one algorithm at one level each, in order, however
    many ranks there are. Levels may be `native`. Raises as `hierarchical`."""
    _check_levels(levels, kind, root, 1)
    return _stages(files(), levels, kind, root)


def _check_levels(levels: Levels, kind: Kind, root: int, slices: int) -> int:
    _known(kind, KINDS, "CP0736", "collective")
    if not levels:
        fail("CP0739", "a hierarchy has at least one level")
    for name, size in levels:
        _known(name, (*files(), NATIVE), "CP0601", "algorithm")
        check_numbers(kind, size, 0, slices)
    n = math.prod(size for _, size in levels)
    check_numbers(kind, n, root, slices)
    return n


def check_numbers(kind: Kind, n: int, root: int, slices: int) -> None:
    """CP0737 where there is no rank, no slice, or no such root."""
    if n < 1:
        fail("CP0737", f"a program is for at least one rank, not {n}")
    if slices < 1:
        fail("CP0737", f"a program has at least one slice, not {slices}")
    if not 0 <= root < n:
        fail("CP0737", f"the root of {n} ranks is 0 to {n - 1}, not {root}")
    if root and kind not in ROOTED:
        fail("CP0737", f"{kind} has no root, found {root}")


def _check_large(name: str, transfers: int) -> None:
    if transfers > TRANSFERS:
        message = f"`{name}` has up to {transfers:,} transfers, and at most {TRANSFERS:,} are written out"
        note = "take fewer ranks or slices, or levels of a hierarchy, which are proved one by one"
        fail("CP0737", message, note)


def _known(name: str, known: Collection[str], code: str, noun: str) -> None:
    if name not in known:
        fail(code, f"there is no {noun} `{name}`", did_you_mean(name, known, "known:"))


def scalar_algorithm(algorithm: Algorithm) -> Algorithm:
    """What reduces the scalars beside leaves that `algorithm` scatters: it too, where it carries out an
    all-reduce; else the backend's own.

    >>> str(scalar_algorithm(Algorithm("ring"))), str(scalar_algorithm(Algorithm("bruck")))
    ('ring', 'native')
    """
    names = {how.name for _, how in algorithm.levels} or {algorithm.name}
    able = all(name == "native" or supports(name, "all_reduce") for name in names)
    return algorithm if able else Algorithm("native")
