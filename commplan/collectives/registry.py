"""The registry of algorithms: chunk programs by the name of their algorithm, with checked arguments.

It discovers the modules in `commplan.collectives.algorithms`. Other packages obtain programs here.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Collection
from fractions import Fraction
from typing import cast

from commplan.collectives import algorithms as algorithm_files
from commplan.collectives.hierarchical import NATIVE, Levels, LevelStage, composed
from commplan.collectives.hierarchical import stages as _stages
from commplan.collectives.postcondition import targets
from commplan.collectives.program import IN_BLOCKS, KINDS, AlgorithmFile, ChunkProgram, Kind
from commplan.collectives.transform import drop_empty, pipelined, rooted
from commplan.diagnostics import did_you_mean, fail
from commplan.ir.collective_kinds import ROOTED
from commplan.ir.hints import Algorithm

# The maximum number of transfers of a program, estimated before it is built. An all_reduce over 4,096 ranks
# in a ring has almost as many, and takes half a gigabyte.
TRANSFERS = 2**25


@functools.cache
def files() -> dict[str, AlgorithmFile]:
    """The modules of all algorithms by name, in alphabetical order."""
    names = sorted(info.name for info in pkgutil.iter_modules(algorithm_files.__path__))
    package = algorithm_files.__name__
    return {name: cast("AlgorithmFile", importlib.import_module(f"{package}.{name}")) for name in names}


def algorithms(kind: Kind | None = None) -> tuple[str, ...]:
    """The names of the algorithms that support `kind`, sorted, without `hierarchical` and `native`.

    Args:
        kind: The collective; None for all algorithms.

    Raises:
        CommplanError: CP0736 if there is no collective `kind`.
    """
    if kind is None:
        return tuple(files())
    _check_name(kind, KINDS, "CP0736", "collective")
    return tuple(name for name, module in files().items() if kind in module.PROGRAMS)


def supports(name: str, kind: Kind) -> bool:
    """Whether there is an algorithm `name` that supports `kind`. False for `hierarchical` and `native`."""
    return name in files() and kind in files()[name].PROGRAMS


def program(name: str, kind: Kind, n: int, *, root: int = 0, slices: int = 1) -> ChunkProgram:
    """The program of algorithm `name` for collective `kind` over `n` ranks.

    Args:
        name: The algorithm, other than `hierarchical` and `native`.
        kind: The collective.
        n: The number of ranks, at least 1.
        root: The rank that has or receives the whole buffer; 0 if `kind` has no root.
        slices: The number of parts of each chunk, at least 1, which are pipelined through the rounds
            (`transform.pipelined`).

    Raises:
        CommplanError: CP0601 (unknown algorithm), CP0736 (unknown collective), CP0603 (unsupported
            collective), or CP0737 (invalid ranks, root or slices, or a program that is too large).

    >>> len(program("ring", "all_reduce", 5).rounds)
    8
    """
    _check_name(kind, KINDS, "CP0736", "collective")
    _check_name(name, files(), "CP0601", "algorithm")
    if not supports(name, kind):
        supporting = ", ".join(f"`{algorithm}`" for algorithm in algorithms(kind))
        fail("CP0603", f"`{name}` does not carry out {kind}", f"{kind} takes {supporting}")
    check_numbers(kind, n, root, slices)
    _check_large(name, files()[name].formula(kind, n)[0] * n * slices)
    body = files()[name].PROGRAMS[kind](n)
    whole = ChunkProgram(name, kind, n, body.chunks, drop_empty(body.rounds), targets=targets(kind, [n]))
    return pipelined(rooted(whole, root), slices)


def formula(name: str, kind: Kind, n: int) -> tuple[int, Fraction]:
    """The cost of `program(name, kind, n)`, without building it.

    Returns:
        The number of rounds, and the bytes that the busiest rank sends or receives, whichever are more, as
        a fraction of the bytes of the buffer.

    Raises:
        CommplanError: CP0601 (unknown algorithm). Other arguments are not checked.
    """
    _check_name(name, files(), "CP0601", "algorithm")
    return files()[name].formula(kind, n)


def hierarchical(levels: Levels, kind: Kind, *, root: int = 0, slices: int = 1) -> ChunkProgram:
    """The program of a collective over several levels.

    rank = outer * (inner ranks) + inner. With slices, one slice is at an outer level while the next is at an
    inner one.

    Args:
        levels: The algorithm and the number of ranks of each level, innermost first; at least one level.
        kind: The collective.
        root: The rank, over all levels, that has or receives the whole buffer; 0 if `kind` has no root.
        slices: As in `program`.

    Raises:
        CommplanError: CP0601, CP0736 and CP0737 as `program`. CP0739 if there is no level, or if a level does
            not support its stage or is `native`, which only has `stages`.

    >>> len(hierarchical([("ring", 4), ("halving_doubling", 2)], "all_reduce").rounds)
    8
    """
    n = _check_levels(levels, kind, root, slices)
    name = f"hierarchical({', '.join(f'{name}[{size}]' for name, size in levels)})"
    transfer_count = 0
    for stage in stages(levels, kind, root=root):
        size = levels[stage.level][1]
        rounds = files()[stage.algorithm].formula(stage.kind, size)[0] if stage.algorithm != NATIVE else 0
        # Blocks of ranks that differ at outer levels are not contiguous: each is a separate transfer.
        outer_ranks = math.prod(size for _, size in levels[stage.level + 1 :])
        transfer_count += rounds * n * (outer_ranks if kind in IN_BLOCKS else 1) * slices
    _check_large(name, transfer_count)
    body = composed(files(), levels, kind, root)
    table = targets(kind, [size for _, size in levels])
    return pipelined(ChunkProgram(name, kind, n, body.chunks, drop_empty(body.rounds), root, table), slices)


def stages(levels: Levels, kind: Kind, *, root: int = 0) -> tuple[LevelStage, ...]:
    """The stages of `hierarchical`: collectives at one level each, in order.

    Levels may be `native`. The time of this function does not depend on the number of ranks.

    Raises:
        CommplanError: As `hierarchical`, except for programs that are too large and for `native` levels.
    """
    _check_levels(levels, kind, root, 1)
    return _stages(files(), levels, kind, root)


def _check_levels(levels: Levels, kind: Kind, root: int, slices: int) -> int:
    """The number of ranks over all levels. Raises CP0601, CP0736, CP0737 or CP0739."""
    _check_name(kind, KINDS, "CP0736", "collective")
    if not levels:
        fail("CP0739", "a hierarchy has at least one level")
    for name, size in levels:
        _check_name(name, (*files(), NATIVE), "CP0601", "algorithm")
        check_numbers(kind, size, 0, slices)
    n = math.prod(size for _, size in levels)
    check_numbers(kind, n, root, slices)
    return n


def check_numbers(kind: Kind, n: int, root: int, slices: int) -> None:
    """Raise CP0737 unless there are ranks and slices, and `root` is a rank, and 0 if `kind` has no root."""
    if n < 1:
        fail("CP0737", f"a program needs at least one rank, not {n}")
    if slices < 1:
        fail("CP0737", f"a program has at least one slice, not {slices}")
    if not 0 <= root < n:
        fail("CP0737", f"the root of {n} ranks is 0 to {n - 1}, not {root}")
    if root and kind not in ROOTED:
        fail("CP0737", f"{kind} has no root, found {root}")


def _check_large(name: str, transfers: int) -> None:
    """Raise CP0737 if a program has more than `TRANSFERS` transfers."""
    if transfers > TRANSFERS:
        message = f"`{name}` has up to {transfers:,} transfers, and at most {TRANSFERS:,} are written out"
        note = "take fewer ranks or slices, or levels of a hierarchy, which are proved one by one"
        fail("CP0737", message, note)


def _check_name(name: str, valid: Collection[str], code: str, noun: str) -> None:
    """Raise `code` if `name` is not one of `valid`; `noun` is its role, for the message."""
    if name not in valid:
        fail(code, f"there is no {noun} `{name}`", did_you_mean(name, valid, "known:"))


def scalar_algorithm(algorithm: Algorithm) -> Algorithm:
    """The algorithm that sums scalars for a stage with `algorithm`, such as the scalar leaves of a scatter.

    Scalars are not split, so they need an all_reduce. The result is `algorithm` if it, or each of its levels,
    supports all_reduce. Otherwise it is `native`.

    >>> str(scalar_algorithm(Algorithm("ring"))), str(scalar_algorithm(Algorithm("bruck")))
    ('ring', 'native')
    """
    names = {level_algorithm.name for _, level_algorithm in algorithm.levels} or {algorithm.name}
    is_supported = all(name == "native" or supports(name, "all_reduce") for name in names)
    return algorithm if is_supported else Algorithm("native")
