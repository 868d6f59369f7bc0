"""ring: every rank sends to its right neighbor, in `reduce` and `gather` to its left neighbor.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). With n
ranks and S bytes on each (of the whole result, if ranks hold blocks):

    all_reduce          2(n-1) rounds, a rank sends 2(n-1)/n S
    reduce_scatter       (n-1) rounds, a rank sends  (n-1)/n S
    all_gather           (n-1) rounds, a rank sends  (n-1)/n S
    broadcast, reduce   2(n-1) rounds, a rank sends S: n chunks, pipelined around the ring
    scatter, gather      (n-1) rounds, the root sends or receives (n-1)/n S: as in a chain

In the first three, all links are busy in every round. The number of bytes is the lower bound of Chan et al.
(2007; see `postcondition.lower_bounds`); the number of rounds is not optimal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms import chain
from commplan.collectives.program import Kind, Programs, Rotation, Round, RoundSequence, rank_range, send
from commplan.collectives.transform import reversed_rounds


def _reduce_scatter(n: int) -> Iterator[Round]:
    """Chunk c starts at rank c + 1 and goes around once; rank c adds the last term."""
    for step in range(n - 1):
        yield (Rotation(n, 1, -1 - step, reduce=True),)


def _all_gather(n: int) -> Iterator[Round]:
    """Every rank sends the block that it received last, beginning with its own."""
    for step in range(n - 1):
        yield (Rotation(n, 1, -step),)


def _broadcast(n: int) -> Iterator[Round]:
    """Rank 0 sends a chunk in each of n rounds; all but the last rank forward the chunk received last."""
    r = rank_range(n)
    for step in range(2 * (n - 1)):
        yield (send(r, r + 1, step - r, where=(r <= step) & (step - r < n) & (r < n - 1)),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    match kind:
        case "all_reduce":
            return 2 * (n - 1), Fraction(2 * (n - 1), n)
        case "broadcast" | "reduce":
            return 2 * (n - 1), Fraction(min(n - 1, 1))
        case _:
            return n - 1, Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_reduce": lambda n: RoundSequence(n, itertools.chain(_reduce_scatter(n), _all_gather(n))),
    "reduce_scatter": lambda n: RoundSequence(n, _reduce_scatter(n)),
    "all_gather": lambda n: RoundSequence(n, _all_gather(n)),
    "broadcast": lambda n: RoundSequence(n, _broadcast(n)),
    "reduce": lambda n: RoundSequence(n, reversed_rounds(_broadcast(n), reduce=True)),
    "scatter": chain.PROGRAMS["scatter"],
    "gather": chain.PROGRAMS["gather"],
}
