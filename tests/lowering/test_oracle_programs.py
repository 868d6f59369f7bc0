"""Every chunk program executed in NumPy equals the definition of its collective bitwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from support.oracle.programs import execute

from commplan.collectives import registry
from commplan.collectives.program import KINDS, ChunkProgram, Kind
from commplan.ir.collective_kinds import ROOTED
from commplan.ir.types import DType

Array = npt.NDArray[np.int32]
Op = Literal["sum", "max", "min"]
MOST = 16


def entering(kind: Kind, ranks: int, size: int, numbers: np.random.Generator) -> list[Array]:
    """The initial buffer of each rank: `size` elements, or blocks of that size."""
    length = ranks * size if kind in ("reduce_scatter", "scatter", "swap") else size
    return list(numbers.integers(-(2**31), 2**31, (ranks, length)).astype(np.int32))


def leaving(kind: Kind, operands: Sequence[Array], root: int, op: Op) -> list[Array | None]:
    """The expected final buffer of each rank; None if the postcondition is undefined there."""
    ranks, fold = len(operands), {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    total = fold.reduce(operands, dtype=np.int32)
    match kind:
        case "all_reduce":
            return [total] * ranks
        case "reduce_scatter":
            return list(total.reshape(ranks, -1))
        case "all_gather":
            return [np.concatenate(operands)] * ranks
        case "broadcast":
            return [operands[root]] * ranks
        case "reduce":
            return [total if rank == root else None for rank in range(ranks)]
        case "scatter":
            return list(operands[root].reshape(ranks, -1))
        case "swap":
            return list(np.stack(operands).reshape(ranks, ranks, -1).swapaxes(0, 1).reshape(ranks, -1))
        case "gather":
            return [np.concatenate(operands) if rank == root else None for rank in range(ranks)]


def check(program: ChunkProgram, size: int, op: Op) -> None:
    operands = entering(program.kind, program.ranks, size, np.random.default_rng([size, program.ranks]))
    before = [each.copy() for each in operands]
    got = execute(program, operands, op)
    expected = leaving(program.kind, operands, program.root, op)
    for rank, (ours, right) in enumerate(zip(got, expected, strict=True)):
        if right is not None:
            assert np.array_equal(ours, right), (program.name, program.kind, program.ranks, size, op, rank)
    assert all(np.array_equal(*pair) for pair in zip(operands, before, strict=True)), "the inputs are kept"


@pytest.mark.parametrize("kind", KINDS)
def test_programs_give_what_their_collective_is_defined_to(kind: Kind):
    ops: tuple[Op, ...] = ("sum", "max", "min")
    for name in registry.algorithms(kind):
        for ranks in range(1, MOST + 1):
            roots = sorted({0, ranks // 2, ranks - 1}) if kind in ROOTED else [0]
            for turn, root in enumerate(roots):
                program = registry.program(name, kind, ranks, root=root)
                # Sizes that no number of chunks divides, that leave chunks empty, and none at all.
                for size in (37, 1, 0):
                    check(program, size, ops[(turn + ranks) % 3])


@pytest.mark.parametrize("kind", KINDS)
def test_slices_change_nothing(kind: Kind):
    for name in registry.algorithms(kind):
        for ranks in (2, 3, 5, 8, 13):
            root = ranks - 1 if kind in ROOTED else 0
            for slices in (2, 5):
                check(registry.program(name, kind, ranks, root=root, slices=slices), 23, "sum")


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
@pytest.mark.parametrize("sizes", [(4, 3), (2, 3, 2), (1, 5)])
def test_hierarchies_change_nothing(kind: Kind, sizes: tuple[int, ...]):
    names = ["binomial_tree", "chain"] if kind == "broadcast" else ["ring", "halving_doubling"]
    for first in names:
        levels = [(first if i % 2 == 0 else "ring", size) for i, size in enumerate(sizes)]
        if kind == "broadcast":
            levels = [(first, size) for size in sizes]
        for slices in (1, 3):
            root = 5 % int(np.prod(sizes)) if kind == "broadcast" else 0
            program = registry.hierarchical(levels, kind, root=root, slices=slices)
            for size in (29, 2):
                check(program, size, "sum")


def test_sums_have_the_order_and_the_rounding_of_the_algorithm():
    # The ring gives chunk c to rank c + 1 first: chunk 0 of three ranks is (x1 + x2) + x0.
    x = [np.array([value] * 3, np.float16) for value in (1.0, 2048.0, -2048.0)]
    got = execute(registry.program("ring", "reduce_scatter", 3), x)
    first = (x[1] + x[2]) + x[0]  # 1
    assert got[0][0] == first[0] == 1
    assert got[1][0] == ((x[2] + x[0]) + x[1])[0] == 1  # -2047 fits
    assert got[2][0] == ((x[0] + x[1]) + x[2])[0] == 0  # 2049 does not: the one is lost


def test_bfloat16_held_as_float32_is_rounded_after_every_sum():
    program = registry.program("ring", "all_reduce", 2)
    x = [np.array([256.0, 1.0], np.float32), np.array([1.0, 1.0], np.float32)]
    got = execute(program, x, dtype=DType.BF16)
    assert all(each.tolist() == [256.0, 2.0] for each in got)


def test_numbers_that_are_none_stay_so():
    program = registry.program("recursive_doubling", "all_reduce", 3)
    x = [np.array([1.0, np.nan, -np.inf], np.float32)] + [np.zeros(3, np.float32)] * 2
    for op in ("sum", "max", "min"):
        for each in execute(program, x, op):
            assert np.isnan(each[1])
    assert execute(program, x, "max")[2].tolist()[2] == 0
    assert execute(program, x, "min")[0].tolist()[2] == -np.inf


def test_booleans_combine():
    x = [np.array([False, True, False]), np.array([False, True, True])]
    program = registry.program("ring", "all_reduce", 2)
    assert execute(program, x, "sum")[0].tolist() == [False, True, True]
    assert execute(program, x, "max")[1].tolist() == [False, True, True]
    assert execute(program, x, "min")[1].tolist() == [False, True, False]
