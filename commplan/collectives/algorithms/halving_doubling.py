"""halving_doubling: pairs exchange halves of their remaining part, and on the way back all of it.

Rabenseifner, "Optimization of collective reduction operations" (2004). With n ranks and S bytes on each

    all_reduce       2 ceil(log2 n) rounds, a rank sends 2(n-1)/n S
    reduce_scatter     ceil(log2 n) rounds, a rank sends  (n-1)/n S
    all_gather         ceil(log2 n) rounds, a rank sends  (n-1)/n S

The bytes are optimal, and so are the rounds except in all_reduce. If n is not a power of two, messages go
around a ring as in `bruck`, at the same cost. The usual alternative, to fold some ranks away, would send up
to 2 S more. If n is a power of two, neighbors exchange the large halves in all_reduce and distant ranks the
small ones. In reduce_scatter and all_gather, whose blocks are in rank order, it is the opposite.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms.recursive_doubling import all_gather
from commplan.collectives.program import Kind, Programs, Round, RoundSequence, log2_up, rank_range, send
from commplan.collectives.transform import reversed_rounds


def _halving(n: int) -> Iterator[Round]:
    """In round k, rank r keeps one half of its part and sends the other half to rank r ^ 2**k.

    It keeps the upper half if bit k of r is set. `n` is a power of two.
    """
    r = rank_range(n)
    first, half = r * 0, n // 2
    for k in range(log2_up(n)):
        upper = r >> k & 1
        yield (send(r, r ^ 1 << k, first + (1 - upper) * half, half, reduce=True),)
        first, half = first + upper * half, half // 2


def _all_reduce(n: int) -> Iterator[Round]:
    """A reduce_scatter followed by an all_gather along the same paths."""
    if n & (n - 1):
        yield from _reduce_scatter(n)
        yield from all_gather(n)
        return
    yield from _halving(n)
    yield from reversed_rounds(_halving(n), reduce=False)


def _reduce_scatter(n: int) -> Iterator[Round]:
    """The paths of the all_gather in reverse, so that rank r ends with block r."""
    return reversed_rounds(all_gather(n), reduce=True)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    times = 2 if kind == "all_reduce" else 1
    return times * log2_up(n), times * Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_reduce": lambda n: RoundSequence(n, _all_reduce(n)),
    "reduce_scatter": lambda n: RoundSequence(n, _reduce_scatter(n)),
    "all_gather": lambda n: RoundSequence(n, all_gather(n)),
}
