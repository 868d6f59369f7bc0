"""bruck: every rank passes all it has to a rank twice as far away each time; few rounds, any number of ranks.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997); the reduction is the reversal of its paths, as in Traff, "Optimal,
non-pipelined reduce-scatter and allreduce algorithms" (2024). With n ranks and S bytes of the whole result

    all_gather       ceil(log2 n) rounds, a rank sends (n-1)/n S
    reduce_scatter   ceil(log2 n) rounds, a rank sends (n-1)/n S
    swap             ceil(log2 n) rounds, a rank sends about log2(n)/2 S

Rounds, and of the first two bytes, are lower bounds. Blocks of an all_gather lie in rank order from the
start, where the original rotates them at the end: a message may wrap around the end of the buffer, and is
then two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.program import Body, Kind, Programs, Rotation, Round, log2_up, ranks, send
from commplan.collectives.transform import reversed_rounds


def all_gather(n: int) -> Iterator[Round]:
    """After k rounds rank r has the 2**k blocks from its own on; it passes them to the rank before them."""
    for far in (1 << k for k in range(log2_up(n))):
        yield (Rotation(n, -far, 0, min(far, n - far)),)


def swap(n: int) -> Iterator[Round]:
    """Slot d travels d ranks: in round k those move on by 2**k whose distance has that bit."""
    r, slot = ranks(n), ranks(n)
    for k in range(log2_up(n)):
        far = 1 << k
        first = slot[(slot & far != 0) & (slot % far == 0)]
        count = np.minimum(far, n - first)
        yield (send(r[:, None], ((r + far) % n)[:, None], first, count),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    if kind == "swap":
        return log2_up(n), Fraction(sum(distance.bit_count() for distance in range(n)), n)
    return log2_up(n), Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_gather": lambda n: Body(n, all_gather(n)),
    "reduce_scatter": lambda n: Body(n, reversed_rounds(all_gather(n), reduce=True)),
    "swap": lambda n: Body(n, swap(n)),
}
