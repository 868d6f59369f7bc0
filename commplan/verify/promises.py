"""What slots hold before a collective and must hold after it, as numbers that the prover works with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commplan.collectives.program import Ints, Kind
from commplan.collectives.promise import promise, reduces

NOTHING = 0  # r + 1 is the contribution of rank r
ANY, SUM = -1, 0  # of `after`: whatever, and the sum of all contributions


class Slots(NamedTuple):
    """before: NOTHING, or r + 1 for the contribution of rank r. after: ANY, SUM, or r + 1. Both
    [ranks, chunks]."""

    before: Ints
    after: Ints


def slots(kind: Kind, ranks: int, chunks: int, root: int) -> Slots:
    """`commplan.collectives.promise` in these numbers."""
    starts, ends = promise(kind, ranks, chunks, root)
    rank = np.arange(1, ranks + 1, dtype=np.int64)[:, None]
    source = SUM if reduces(kind) else starts.argmax(axis=0)[None, :] + 1
    return Slots(np.where(starts, rank, NOTHING), np.where(ends, source, ANY))
