"""binomial_tree: in each round, every rank that has the data sends it on; the distance halves each time.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005); Chan et
al., "Collective communication: theory, practice, and experience" (2007). With n ranks and S bytes

    broadcast, reduce    ceil(log2 n) rounds, the root sends or receives ceil(log2 n) S
    all_reduce         2 ceil(log2 n) rounds: reduce, then broadcast; the root sends ceil(log2 n) S
    scatter, gather      ceil(log2 n) rounds, the root sends or receives (n-1)/n S

The number of rounds is optimal except in all_reduce. The number of bytes is optimal in scatter and gather
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.program import Kind, Programs, Round, log2_up, rank_range, send
from commplan.collectives.transform import from_root


def _broadcast(n: int) -> Iterator[Round]:
    """Ranks that are multiples of 2d have the data and send it to the rank `d` to the right; d is halved.

    The first d is the largest power of two below `n`.
    """
    r = rank_range(n)
    for k in reversed(range(log2_up(n))):
        d = 1 << k
        yield (send(r, r + d, 0, where=(r % (2 * d) == 0) & (r + d < n)),)


def _scatter(n: int) -> Iterator[Round]:
    """As `_broadcast`, but each message has only the blocks that the receiver keeps or forwards."""
    r = rank_range(n)
    for k in reversed(range(log2_up(n))):
        d = 1 << k
        yield (send(r, r + d, r + d, np.minimum(d, n - r - d), where=(r % (2 * d) == 0) & (r + d < n)),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    if kind in ("scatter", "gather"):
        return log2_up(n), Fraction(n - 1, n)
    return (2 if kind == "all_reduce" else 1) * log2_up(n), Fraction(log2_up(n))


PROGRAMS: Programs = from_root(_broadcast, _scatter)
