"""ring: every rank sends to its right neighbour, all links busy in every round.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). With n
ranks and S bytes on each (of the whole result, where ranks hold blocks):

    all_reduce          2(n-1) rounds, a rank sends 2(n-1)/n S
    reduce_scatter       (n-1) rounds, a rank sends  (n-1)/n S
    all_gather           (n-1) rounds, a rank sends  (n-1)/n S
    broadcast, reduce   2(n-1) rounds, a rank sends S: n chunks, one behind the other around the ring
    scatter, gather      (n-1) rounds, the root sends or receives (n-1)/n S: as of a chain

The bytes are the lower bound of Chan et al. (2007); rounds are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms import chain
from commplan.collectives.program import Body, Kind, Programs, Rotation, Round, ranks, send
from commplan.collectives.transform import reversed_rounds


def _reduce_scatter(n: int) -> Iterator[Round]:
    """Chunk c starts at rank c + 1 and goes once around; rank c adds the last term."""
    for step in range(n - 1):
        yield (Rotation(n, 1, -1 - step, reduce=True),)


def _all_gather(n: int) -> Iterator[Round]:
    """Every rank passes on what it has got last, its own block first."""
    for step in range(n - 1):
        yield (Rotation(n, 1, -step),)


def _broadcast(n: int) -> Iterator[Round]:
    """Rank 0 sends a chunk in each of n rounds; all but the last rank pass on what has just come."""
    r = ranks(n)
    for step in range(2 * (n - 1)):
        yield (send(r, r + 1, step - r, where=(r <= step) & (step - r < n) & (r < n - 1)),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """Rounds, and the share of S that the busiest rank sends or receives."""
    match kind:
        case "all_reduce":
            return 2 * (n - 1), Fraction(2 * (n - 1), n)
        case "broadcast" | "reduce":
            return 2 * (n - 1), Fraction(min(n - 1, 1))
        case _:
            return n - 1, Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_reduce": lambda n: Body(n, itertools.chain(_reduce_scatter(n), _all_gather(n))),
    "reduce_scatter": lambda n: Body(n, _reduce_scatter(n)),
    "all_gather": lambda n: Body(n, _all_gather(n)),
    "broadcast": lambda n: Body(n, _broadcast(n)),
    "reduce": lambda n: Body(n, reversed_rounds(_broadcast(n), reduce=True)),
    "scatter": chain.PROGRAMS["scatter"],
    "gather": chain.PROGRAMS["gather"],
}
