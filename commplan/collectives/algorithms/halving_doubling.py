"""halving_doubling: pairs exchange halves of their remaining part, and on the way back all of it.

Rabenseifner, "Optimization of collective reduction operations" (2004). With n ranks and S bytes on each

    all_reduce       2 ceil(log2 n) rounds, a rank sends 2(n-1)/n S
    reduce_scatter     ceil(log2 n) rounds, a rank sends  (n-1)/n S
    all_gather         ceil(log2 n) rounds, a rank sends  (n-1)/n S

The bytes are optimal, and so are the rounds except of all_reduce. If n is not a power of two, messages go
around a ring as in `bruck`, at the same cost; folding ranks, as is usual, would send up to 2 S more. In
all_reduce, neighbors exchange the large halves and distant ranks the small ones. Collectives with blocks in
rank order do the opposite.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms.recursive_doubling import all_gather
from commplan.collectives.program import Kind, Programs, Round, RoundSequence, log2_up, ranks, send
from commplan.collectives.transform import reversed_rounds


def _halving(n: int) -> Iterator[Round]:
    """Rank r keeps the upper half of its part if bit k of r is set, and sends the other half to r ^ 2**k."""
    r = ranks(n)
    first, half = r * 0, n // 2
    for k in range(log2_up(n)):
        upper = r >> k & 1
        yield (send(r, r ^ 1 << k, first + (1 - upper) * half, half, reduce=True),)
        first, half = first + upper * half, half // 2


def _all_reduce(n: int) -> Iterator[Round]:
    if n & (n - 1):
        yield from _reduce_scatter(n)
        yield from all_gather(n)
        return
    yield from _halving(n)
    yield from reversed_rounds(_halving(n), reduce=False)


def _reduce_scatter(n: int) -> Iterator[Round]:
    return reversed_rounds(all_gather(n), reduce=True)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    times = 2 if kind == "all_reduce" else 1
    return times * log2_up(n), times * Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_reduce": lambda n: RoundSequence(n, _all_reduce(n)),
    "reduce_scatter": lambda n: RoundSequence(n, _reduce_scatter(n)),
    "all_gather": lambda n: RoundSequence(n, all_gather(n)),
}
