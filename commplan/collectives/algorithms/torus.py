"""torus: rings along the rows of a grid of ranks, then along its columns; fewer rounds than one ring.

Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash" (2018). The n ranks form a
grid of b rows of a ranks, with a the largest divisor of n up to its square root; a prime n is one ring. It is
`hierarchical` over the rows and columns. With S bytes on each rank (of the whole result, if ranks hold
blocks):

    all_reduce         2(a-1) + 2(b-1) rounds, a rank sends 2(n-1)/n S
    reduce_scatter      (a-1) +  (b-1) rounds, a rank sends  (n-1)/n S
    all_gather          (a-1) +  (b-1) rounds, a rank sends  (n-1)/n S
    broadcast, reduce  2(a-1) + 2(b-1) rounds, a rank sends (a+1)/a S, or S if a = 1
    scatter, gather     (a-1) +  (b-1) rounds, the root sends or receives (n-1)/n S

The number of bytes is optimal except for broadcast and reduce. In a broadcast the root's row scatters, each
column broadcasts its part along a ring, and all rows gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms import ring
from commplan.collectives.hierarchical import composed
from commplan.collectives.program import Kind, Programs, Round, RoundSequence


def shape(n: int) -> tuple[int, int]:
    """The number of columns and rows of the most nearly square grid.

    >>> shape(12), shape(13)
    ((3, 4), (1, 13))
    """
    columns = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    return columns, n // columns


def _rounds(kind: Kind, n: int) -> Iterator[Round]:
    """The rounds of rings over the rows, as the inner level, and over the columns."""
    yield from composed({"ring": ring}, [("ring", size) for size in shape(n)], kind).rounds


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    a, b = shape(n)
    one_way = a - 1 + b - 1
    match kind:
        case "all_reduce":
            return 2 * one_way, Fraction(2 * (n - 1), n)
        case "broadcast" | "reduce":
            return 2 * one_way, Fraction(a + 1, a) if a > 1 else Fraction(min(n - 1, 1))
        case _:
            return one_way, Fraction(n - 1, n)


PROGRAMS: Programs = {kind: lambda n, kind=kind: RoundSequence(n, _rounds(kind, n)) for kind in ring.PROGRAMS}
