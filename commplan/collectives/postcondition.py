"""What each collective promises, as data, and what no program for it can go below.

Before the first round some slots hold a contribution of their rank, all others nothing. After the last round
some slots must hold every contribution to their chunk, each exactly once; what lies in the others is nobody's
business. Of the kinds that reduce every rank contributes to every chunk; of the others each chunk has one
source, and "every contribution" is a copy of it.
"""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.program import BLOCKED, Bools, Kind, log2_up
from commplan.diagnostics import fail

SLOTS = 2**26


class Holders(enum.Enum):
    """Who holds a chunk, of the ranks of a collective or of the places of a level."""

    ALL = "all places"
    OWN = "the place whose part it is"
    ROOT = "the place of the root"


# Who must hold a chunk before a collective, and who holds it after.
HOLDERS: dict[Kind, tuple[Holders, Holders]] = {
    "all_reduce": (Holders.ALL, Holders.ALL),
    "reduce_scatter": (Holders.ALL, Holders.OWN),
    "reduce": (Holders.ALL, Holders.ROOT),
    "all_gather": (Holders.OWN, Holders.ALL),
    "gather": (Holders.OWN, Holders.ROOT),
    "scatter": (Holders.ROOT, Holders.OWN),
    "broadcast": (Holders.ROOT, Holders.ALL),
}


class Promise(NamedTuple):
    """`starts[r, c]`: rank r begins with a contribution to chunk c. `ends[r, c]`: it must end with chunk c
    complete, the contributions of all r' with `starts[r', c]`. Both [ranks, chunks]."""

    starts: Bools
    ends: Bools


def promise(kind: Kind, ranks: int, chunks: int, root: int = 0) -> Promise:
    """What `kind` promises; `chunks` is a multiple of `ranks` where every rank has a block of its own.

    Raises CP0737 where there are more than `SLOTS` slots.
    """
    if ranks * chunks > SLOTS:
        message = f"{ranks} ranks with {chunks} chunks each are more than can be followed one by one"
        fail("CP0737", message, "a hierarchy is followed level by level, however many ranks it has")
    slots = {holders: np.ones((ranks, chunks), np.bool_) for holders in Holders}
    slots[Holders.ROOT][np.arange(ranks) != root] = False
    if kind in BLOCKED:
        slots[Holders.OWN] = np.repeat(np.eye(ranks, dtype=np.bool_), chunks // ranks, axis=1)
    before, after = HOLDERS[kind]
    return Promise(slots[before], slots[after])


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
