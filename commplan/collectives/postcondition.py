"""What each collective promises, as data, and what no program for it can go below.

Before the first round some slots hold a contribution of their rank, all others nothing. After the last round
some slots must hold every contribution to their chunk, each exactly once; what lies in the others is not
defined. Of the kinds that reduce every rank contributes to every chunk; of the others each chunk has one
source, and "every contribution" is a copy of it. Of a swap every slot of every rank has a source of its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import BLOCKED, NO_TARGETS, Bools, Ints, Kind, Program, log2_up, ranks
from commplan.diagnostics import fail

SLOTS = 2**26


class Holders(enum.Enum):
    """Who holds a chunk, of the ranks of a collective or of the places of a level."""

    ALL = "all places"
    OWN = "the place whose part it is"
    ROOT = "the place of the root"
    FOR = "each place what it has for the others"
    FROM = "each place what the others had for it"


# Who must hold a chunk before a collective, and who holds it after.
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


class Promise(NamedTuple):
    """`starts[r, c]`: rank r begins with a contribution to chunk c. `ends[r, c]`: it must end with chunk c
    complete, the contributions of all r' with `starts[r', c]`. Both [ranks, chunks]."""

    starts: Bools
    ends: Bools


def promise(kind: Kind, n: int, chunks: int, root: int = 0, *, few: int | None = None) -> Promise:
    """What `kind` promises; `chunks` is a multiple of `n` if every rank has a block of its own.

    few: how many chunks, from chunk 0 on, the result is of; None for all. Raises CP0737 if that is more than
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
    return Promise(slots(before), slots(after))


def sources(program: Program, few: int | None = None) -> Ints:
    """Of a kind that copies, the rank whose contribution a slot must end with where the promise says that it
    holds one: [ranks, chunks] of a swap, else [1, chunks]. few: as of `promise`, of all kinds but a swap."""
    if program.kind == "swap":
        return np.repeat(program.sources, program.chunks // program.ranks, axis=1)
    starts = promise(program.kind, program.ranks, program.chunks, program.root, few=few).starts
    return starts.argmax(axis=0)[None, :]


def targets(kind: Kind, sizes: Sequence[int]) -> Ints:
    """`Program.targets` of ranks that are counted level by level, the innermost first and fastest.

    Raises CP0737 as `promise` does.

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
        message = f"{n} ranks with {chunks} chunks each are more than can be followed one by one"
        fail("CP0737", message, "a hierarchy is followed level by level, however many ranks it has")


def lower_bounds(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The least rounds, and the least share of S that some rank must send or receive.

    Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
    experience" (2007), table I: what one rank has or needs cannot reach all in fewer than ceil(log2 n)
    rounds, as the ranks that it has reached at most double; a root sends or receives all that it does not
    keep; a reduced chunk is made of n - 1 received ones, and then sent to n - 1 ranks.
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
