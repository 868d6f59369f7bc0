"""What each collective promises, as data.

Before the first round some slots hold a contribution of their rank, all others nothing. After the last round
some slots must hold every contribution to their chunk, each exactly once; what lies in the others is nobody's
business. Of the kinds that reduce every rank contributes to every chunk; of the others each chunk has one
source, and "every contribution" is a copy of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commplan.collectives.program import BLOCKED, Bools, Kind
from commplan.diagnostics import fail

SLOTS = 2**26


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
        fail(
            "CP0737",
            f"{ranks} ranks with {chunks} chunks each are more than can be followed one by one",
            "a hierarchy is followed level by level, however many ranks it has",
        )
    every = np.ones((ranks, chunks), np.bool_)
    at_root = np.zeros_like(every)
    at_root[root] = True
    own = at_root
    if kind in BLOCKED:
        own = np.repeat(np.eye(ranks, dtype=np.bool_), chunks // ranks, axis=1)
    match kind:
        case "all_reduce":
            return Promise(every, every)
        case "reduce_scatter":
            return Promise(every, own)
        case "all_gather":
            return Promise(own, every)
        case "broadcast":
            return Promise(at_root, every)
        case "reduce":
            return Promise(every, at_root)
        case "scatter":
            return Promise(at_root, own)
        case "gather":
            return Promise(own, at_root)
