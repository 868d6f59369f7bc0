"""scatter_gather: a broadcast as a scatter followed by an all-gather, for large buffers.

Barnett, Shuler, van de Geijn, Gupta, Payne and Watts, "Interprocessor collective communication library"
(1994). The scatter is that of `binomial_tree`, the all-gather that of `halving_doubling`, without messages
that a rank already has from the scatter. With n ranks and S bytes

    broadcast   2 ceil(log2 n) rounds, the root sends    2(n-1)/n S
    reduce      2 ceil(log2 n) rounds, the root receives 2(n-1)/n S: the same in reverse

The number of bytes is at most twice the lower bound, for any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.algorithms import binomial_tree, halving_doubling
from commplan.collectives.postcondition import postcondition
from commplan.collectives.program import Kind, Programs, Round, RoundSequence, log2_up
from commplan.collectives.transform import pruned, reversed_rounds


def _broadcast(n: int) -> Iterator[Round]:
    """A scatter and an all_gather, without the transfers of blocks that the receiver has."""
    scattered = binomial_tree.PROGRAMS["scatter"](n).rounds
    rounds = itertools.chain(scattered, halving_doubling.all_gather(n))
    yield from pruned(rounds, *postcondition("broadcast", n, n))


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    return 2 * log2_up(n), Fraction(2 * (n - 1), n)


PROGRAMS: Programs = {
    "broadcast": lambda n: RoundSequence(n, _broadcast(n)),
    "reduce": lambda n: RoundSequence(n, reversed_rounds(_broadcast(n), reduce=True)),
}
