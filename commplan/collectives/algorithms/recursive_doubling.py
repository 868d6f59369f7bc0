"""recursive_doubling: pairs exchange partial sums of groups that double in size; few rounds, many bytes.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005). For a
number of ranks that is not a power of two, they fold some ranks away, in two more rounds. Here halves may
differ by one: the lower half is the larger one, and its last rank, which has no partner, receives the sum
from the first rank of the upper half, which sends twice. With n ranks and S bytes on each

    all_reduce       ceil(log2 n) rounds, a rank sends and receives ceil(log2 n) S
                     (S more on some ranks if halves differ)
    all_gather       ceil(log2 n) rounds, a rank sends (n-1)/n S

The number of rounds is optimal. In all_reduce all ranks add the same sums of halves, so their results are
bitwise equal. If the number of ranks is not a power of two, all_gather is that of `bruck`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.algorithms import bruck
from commplan.collectives.program import Kind, Programs, Round, RoundSequence, log2_up, rank_range, send


def _all_reduce(n: int) -> Iterator[Round]:
    """Divide the ranks into halves recursively; then exchange the sums of halves, smallest groups first."""
    r = rank_range(n)
    # The first rank and the size of the group of each rank, [n]. All ranks begin in one group.
    low = np.zeros_like(r)
    size = np.full_like(r, n)
    rounds: list[Round] = []
    for _ in range(log2_up(n)):
        lower, upper = size - size // 2, size // 2
        position, is_lower = r - low, r - low < lower
        has_peer = (is_lower & (position < upper)) | ~is_lower
        sends_twice = (position == lower) & (lower > upper) & (size > 1)
        peer = np.where(is_lower, r + lower, r - lower)
        exchange = send(r, peer, 0, reduce=True, where=has_peer)
        rounds.append((exchange, send(r, r - 1, 0, reduce=True, where=sends_twice)))
        low, size = np.where(is_lower, low, low + lower), np.where(is_lower, lower, upper)
    yield from reversed(rounds)


def all_gather(n: int) -> Iterator[Round]:
    """In round k, ranks r and r ^ 2**k exchange the 2**k blocks of their groups of 2**k ranks.

    This is so if `n` is a power of two. For other numbers the rounds are those of `bruck.all_gather`.
    """
    if n & (n - 1):
        yield from bruck.all_gather(n)
        return
    r = rank_range(n)
    for k in range(log2_up(n)):
        yield (send(r, r ^ 1 << k, r >> k << k, 1 << k),)


@functools.cache
def _sends_most(n: int) -> int:
    """The number of messages that the busiest rank sends in an all_reduce over `n` ranks."""
    if n == 1:
        return 0
    lower, upper = n - n // 2, n // 2
    # The first rank of a smaller upper half sends in every round of its half, and then twice.
    double_sender = log2_up(upper) + 2 if lower > upper else 0
    return max(_sends_most(lower) + 1, _sends_most(upper) + 1, double_sender)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    if kind == "all_reduce":
        return log2_up(n), Fraction(_sends_most(n))
    return log2_up(n), Fraction(n - 1, n)


PROGRAMS: Programs = {
    "all_reduce": lambda n: RoundSequence(1, _all_reduce(n)),
    "all_gather": lambda n: RoundSequence(n, all_gather(n)),
}
