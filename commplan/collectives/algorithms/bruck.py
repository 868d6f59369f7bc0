"""bruck: every rank sends all its blocks over twice the distance of the last round, for any number of ranks.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997); the reduction reverses its paths, as in Traff, "Optimal, non-pipelined
reduce-scatter and allreduce algorithms" (2024). With n ranks and S bytes of the whole result

    all_gather       ceil(log2 n) rounds, a rank sends (n-1)/n S
    reduce_scatter   ceil(log2 n) rounds, a rank sends (n-1)/n S
    swap             ceil(log2 n) rounds, a rank sends about log2(n)/2 S

The number of rounds is optimal, and so are the bytes of all_gather and reduce_scatter. The blocks of an
all_gather are always in rank order, so no final rotation is needed; a message that wraps around the end of
the buffer consists of two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.program import (
    Kind,
    Programs,
    Rotation,
    Round,
    RoundSequence,
    log2_up,
    rank_range,
    send,
)
from commplan.collectives.transform import reversed_rounds


def all_gather(n: int) -> Iterator[Round]:
    """After k rounds rank r has blocks r to r + 2**k - 1, and sends them to rank r - 2**k, all modulo `n`.

    In the last round it sends only the blocks that the receiver lacks.
    """
    for distance in (1 << k for k in range(log2_up(n))):
        yield (Rotation(n, -distance, 0, min(distance, n - distance)),)


def swap(n: int) -> Iterator[Round]:
    """The block in slot d moves d ranks: in round k by 2**k, if bit k of d is set."""
    r, slot = rank_range(n), rank_range(n)
    for k in range(log2_up(n)):
        distance = 1 << k
        # Slots with bit k set form runs of 2**k slots; the last run may be shorter.
        first = slot[(slot & distance != 0) & (slot % distance == 0)]
        count = np.minimum(distance, n - first)
        yield (send(r[:, None], ((r + distance) % n)[:, None], first, count),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    if kind == "swap":
        return log2_up(n), Fraction(sum(distance.bit_count() for distance in range(n)), n)
    return log2_up(n), Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_gather": lambda n: RoundSequence(n, all_gather(n)),
    "reduce_scatter": lambda n: RoundSequence(n, reversed_rounds(all_gather(n), reduce=True)),
    "swap": lambda n: RoundSequence(n, swap(n)),
}
