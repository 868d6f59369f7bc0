"""The postconditions of collectives, as data, and lower bounds of their costs.

Before the first round, some slots hold a contribution of their rank, all others nothing. After the last
round, some slots must hold every contribution to their chunk exactly once; the content of the others is
undefined. In reductions, every rank contributes to every chunk. In other collectives each chunk has one
source, and the result is a copy of its contribution. In a swap, every slot of every rank has a different
source.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import NO_TARGETS, Bools, ChunkProgram, Ints, Kind, log2_up, ranks
from commplan.diagnostics import fail
from commplan.ir.collective_kinds import BLOCKED

SLOTS = 2**26


class Holders(enum.Enum):
    """The ranks of a collective, or places of a level, that hold a chunk."""

    ALL = "all places"
    OWN = "the owner of the part"
    ROOT = "the place of the root"
    FOR = "each place its blocks for the others"
    FROM = "each place the blocks of the others for it"


# The holders of a chunk before and after a collective.
HOLDERS: dict[Kind, tuple[Holders, Holders]] = {
    "all_reduce": (Holders.ALL, Holders.ALL),
    "reduce_scatter": (Holders.ALL, Holders.OWN),
    "reduce": (Holders.ALL, Holders.ROOT),
    "all_gather": (Holders.OWN, Holders.ALL),
    "gather": (Holders.OWN, Holders.ROOT),
    "scatter": (Holders.ROOT, Holders.OWN),
    "broadcast": (Holders.ROOT, Holders.ALL),
    "swap": (Holders.FOR, Holders.FROM),
}


class Postcondition(NamedTuple):
    """The initial and final contents of slots, both [ranks, chunks].

    Attributes:
        starts: `starts[r, c]`: rank r begins with a contribution to chunk c.
        ends: `ends[r, c]`: rank r must end with the contributions of all r' with `starts[r', c]` to chunk c.
    """

    starts: Bools
    ends: Bools


def postcondition(kind: Kind, n: int, chunks: int, root: int = 0, *, few: int | None = None) -> Postcondition:
    """The postcondition of `kind`; `chunks` is a multiple of `n` if every rank has a block.

    The result covers the first `few` chunks, or all if it is None. Raises CP0737 if it would have more than
    `SLOTS` slots.
    """
    columns = chunks if few is None else few
    _check_slots(n, columns)

    def slots(holders: Holders) -> Bools:
        rank = np.arange(n)[:, None]
        if holders is Holders.ROOT:
            return np.repeat(rank == root, columns, axis=1)
        if holders is Holders.OWN and kind in BLOCKED:
            return rank == np.arange(columns) // (chunks // n)
        return np.ones((n, columns), np.bool_)

    before, after = HOLDERS[kind]
    return Postcondition(slots(before), slots(after))


def sources(program: ChunkProgram, few: int | None = None) -> Ints:
    """The source of the content that each slot must end with, for a collective that copies.

    Args:
        program: The program.
        few: As in `postcondition`; not for a swap.

    Returns:
        Ranks, [ranks, chunks] for a swap, else [1, chunks]. Only slots in the postcondition are meaningful.
    """
    if program.kind == "swap":
        return np.repeat(program.sources, program.chunks // program.ranks, axis=1)
    starts = postcondition(program.kind, program.ranks, program.chunks, program.root, few=few).starts
    return starts.argmax(axis=0)[None, :]


def targets(kind: Kind, sizes: Sequence[int]) -> Ints:
    """`ChunkProgram.targets` for ranks counted level by level, with the innermost level first and fastest.

    Raises CP0737 as `postcondition` does.

    >>> targets("swap", [3]).tolist()
    [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    >>> targets("swap", [2, 2])[1].tolist()
    [1, 0, 3, 2]
    """
    if kind != "swap":
        return NO_TARGETS
    _check_slots(math.prod(sizes), math.prod(sizes))
    rank = distance = ranks(math.prod(sizes))
    table, step = np.zeros((len(rank), len(rank)), np.int64), 1
    for size in sizes:
        table += (rank[:, None] + distance) % size * step
        rank, distance, step = rank // size, distance // size, step * size
    return table


def _check_slots(n: int, chunks: int) -> None:
    if n * chunks > SLOTS:
        message = f"{n} ranks with {chunks} chunks each are too many to trace one by one"
        fail("CP0737", message, "a hierarchy is traced level by level, however many ranks it has")


def lower_bounds(kind: Kind, n: int) -> tuple[int, Fraction]:
    """Lower bounds of rounds, and of the fraction of S that some rank must send or receive.

    Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience"
    (2007), table I. The number of ranks reached by one rank at most doubles per round, so data takes
    ceil(log2 n) rounds to reach all. A root sends or receives everything that it does not keep. A reduced
    chunk requires receiving n - 1 chunks, and sending the result to n - 1 ranks.
    """
    if n == 1:
        return 0, Fraction(0)
    match kind:
        case "broadcast" | "reduce":
            return log2_up(n), Fraction(1)
        case "all_reduce":
            return log2_up(n), Fraction(2 * (n - 1), n)
        case _:
            return log2_up(n), Fraction(n - 1, n)
