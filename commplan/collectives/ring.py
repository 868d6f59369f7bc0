"""ring: every rank sends to its right neighbour, all links busy in every round.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). With n
ranks and S bytes on each (of the whole result, where ranks hold blocks):

    all_reduce       2(n-1) rounds, a rank sends 2(n-1)/n S
    reduce_scatter    (n-1) rounds, a rank sends  (n-1)/n S
    all_gather        (n-1) rounds, a rank sends  (n-1)/n S

The bytes are the lower bound of Chan et al. (2007); rounds are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.program import Body, Kind, Round, ranks, send


def _reduce_scatter(n: int) -> Iterator[Round]:
    """Chunk c starts at rank c + 1 and goes once around; rank c adds the last term."""
    r = ranks(n)
    for step in range(n - 1):
        yield (send(r, (r + 1) % n, (r - 1 - step) % n, reduce=True),)


def _all_gather(n: int) -> Iterator[Round]:
    """Every rank passes on what it has got last, its own block first."""
    r = ranks(n)
    for step in range(n - 1):
        yield (send(r, (r + 1) % n, (r - step) % n),)


def reduce_scatter(n: int) -> Body:
    return Body(n, _reduce_scatter(n))


def all_gather(n: int) -> Body:
    return Body(n, _all_gather(n))


def all_reduce(n: int) -> Body:
    return Body(n, (*_reduce_scatter(n), *_all_gather(n)))


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """Rounds, and the share of S that the busiest rank sends."""
    once = (n - 1, Fraction(n - 1, n))
    return (2 * once[0], 2 * once[1]) if kind == "all_reduce" else once


PROGRAMS = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
