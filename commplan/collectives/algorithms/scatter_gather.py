"""scatter_gather: a broadcast as a scatter and an all-gather, for large buffers.

Barnett, Shuler, van de Geijn, Gupta, Payne and Watts, "Interprocessor collective communication
library" (1994).
The scatter is that of `binomial_tree`, the all-gather that of `halving_doubling`; what a rank holds from the
scatter it is not sent again. With n ranks and S bytes

    broadcast   2 ceil(log2 n) rounds, the root sends    2(n-1)/n S
    reduce      2 ceil(log2 n) rounds, the root receives 2(n-1)/n S: the same backwards

Bytes are at most twice the lower bound, however many ranks there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms import binomial_tree, halving_doubling
from commplan.collectives.postcondition import promise
from commplan.collectives.program import Body, Kind, Programs, Round, log2_up
from commplan.collectives.transform import pruned, reversed_rounds


def _broadcast(n: int) -> Iterator[Round]:
    scattered = binomial_tree.PROGRAMS["scatter"](n).rounds
    rounds = itertools.chain(scattered, halving_doubling.all_gather(n))
    yield from pruned(rounds, *promise("broadcast", n, n))


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    return 2 * log2_up(n), Fraction(2 * (n - 1), n)


PROGRAMS: Programs = {
    "broadcast": lambda n: Body(n, _broadcast(n)),
    "reduce": lambda n: Body(n, reversed_rounds(_broadcast(n), reduce=True)),
}
