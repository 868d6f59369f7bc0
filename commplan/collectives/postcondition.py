"""The postconditions of collectives, as data, and lower bounds of their costs.

Before the first round, some slots hold a contribution of their rank, and the others are empty. After the last
round, some slots must hold every contribution to their chunk exactly once; the content of the others is
undefined. In reductions, every rank contributes to every chunk. In other collectives each chunk has one
source, and the result is a copy of its contribution. In a swap, every slot of a rank has a different source.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import NO_TARGETS, Bools, ChunkProgram, Ints, Kind, log2_up, rank_range
from commplan.diagnostics import fail
from commplan.ir.collective_kinds import BLOCKED

# The maximum number of slots, ranks times chunks, of the arrays in this module: 64 MiB for a `Bools` array.
SLOTS = 2**26


class Holders(enum.Enum):
    """The ranks of a collective, or the places of a level of a hierarchy, that hold a chunk.

    The values are texts for proofs.

    Attributes:
        ALL: All of them.
        OWN: The rank whose block the chunk belongs to.
        ROOT: The root.
        FOR: In a swap, the sender: each rank has a block for each destination.
        FROM: In a swap, the receiver: each rank has a block from each source.
    """

    ALL = "all places"
    OWN = "the owner of the part"
    ROOT = "the place of the root"
    FOR = "each place its blocks for the others"
    FROM = "each place the blocks of the others for it"


# By kind, the holders of a chunk before and after the collective.
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
    """The initial and final contents of slots, as two masks of shape [ranks, chunks].

    Attributes:
        starts: `starts[r, c]` is whether rank r begins with a contribution to chunk c.
        ends: `ends[r, c]` is whether rank r must end with the contributions to chunk c of all ranks r' with
            `starts[r', c]`.
    """

    starts: Bools
    ends: Bools


def postcondition(kind: Kind, n: int, chunks: int, root: int = 0, *, few: int | None = None) -> Postcondition:
    """The postcondition of a collective.

    For a swap both masks are all True; `sources` and `targets` have the blocks.

    Args:
        kind: The collective.
        n: The number of ranks.
        chunks: The number of chunks, a multiple of `n` if every rank has a block.
        root: The root; ignored if `kind` has none.
        few: The number of leading chunks that the result covers; None for all.

    Raises:
        CommplanError: CP0737 if the result would have more than `SLOTS` slots.
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
    """The rank whose contribution each slot must end with, for a collective that copies.

    Args:
        program: The program. Its kind is not a reduction.
        few: As in `postcondition`; ignored for a swap.

    Returns:
        For a swap, [ranks, chunks]. Otherwise the sources do not depend on the rank: [1, chunks], or
        [1, few]. They apply to the slots in `Postcondition.ends`.

    Raises:
        CommplanError: CP0737 as `postcondition` does, if `program` is not a swap.
    """
    if program.kind == "swap":
        return np.repeat(program.sources, program.chunks // program.ranks, axis=1)
    starts = postcondition(program.kind, program.ranks, program.chunks, program.root, few=few).starts
    return starts.argmax(axis=0)[None, :]


def targets(kind: Kind, sizes: Sequence[int]) -> Ints:
    """The value of `ChunkProgram.targets` for a program over levels.

    Args:
        kind: The collective.
        sizes: The number of ranks at each level, innermost first; the innermost varies fastest in a rank.

    Returns:
        For a swap, the destination of the initial block of each slot of each rank, [ranks, ranks]; else
        `NO_TARGETS`.

    Raises:
        CommplanError: CP0737 if a swap has more than `SLOTS` slots.

    >>> targets("swap", [3]).tolist()
    [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    >>> targets("swap", [2, 2])[1].tolist()
    [1, 0, 3, 2]
    """
    if kind != "swap":
        return NO_TARGETS
    _check_slots(math.prod(sizes), math.prod(sizes))
    rank = distance = rank_range(math.prod(sizes))
    table = np.zeros((len(rank), len(rank)), np.int64)
    stride = 1  # the difference between ranks that are adjacent at the level
    for size in sizes:
        # Places are added level by level, without carry to the next level.
        table += (rank[:, None] + distance) % size * stride
        rank, distance, stride = rank // size, distance // size, stride * size
    return table


def _check_slots(n: int, chunks: int) -> None:
    if n * chunks > SLOTS:
        message = f"{n} ranks with {chunks} chunks each are too many to trace one by one"
        fail("CP0737", message, "a hierarchy is traced level by level, however many ranks it has")


def lower_bounds(kind: Kind, n: int) -> tuple[int, Fraction]:
    """Lower bounds of the number of rounds, and of the fraction of S that the busiest rank transfers.

    S is the bytes of the buffer, or of all blocks if every rank has one. A rank transfers the larger of the
    bytes that it sends and the bytes that it receives.

    The number of ranks that have data of one rank at most doubles per round, so data takes ceil(log2 n)
    rounds to reach all. A root sends or receives everything that it does not keep. To reduce a chunk on all
    ranks, n - 1 chunks must be received, and the result must be sent to n - 1 ranks.

    References:
        Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
        experience" (2007), table I.
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
