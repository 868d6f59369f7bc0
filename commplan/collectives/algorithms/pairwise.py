"""pairwise: every rank sends each block directly to its destination, one after the other.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), the
all-to-all for long messages. With n ranks and S bytes on each

    swap   (n-1) rounds, a rank sends (n-1)/n S

The number of bytes is optimal, the number of rounds is not. In round d every rank sends to the rank d places
further, so that each receives from one.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.program import Kind, Programs, Round, RoundSequence, rank_range, send


def _swap(n: int) -> Iterator[Round]:
    """Slot d goes to the rank d places further."""
    r = rank_range(n)
    for distance in range(1, n):
        yield (send(r, (r + distance) % n, distance),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    del kind
    return n - 1, Fraction(n - 1, n)


PROGRAMS: Programs = {"swap": lambda n: RoundSequence(n, _swap(n))}
