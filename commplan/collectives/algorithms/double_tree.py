"""double_tree: two binary trees, each for half of the buffer; inner nodes of one are leaves of the other.

Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009). A
tree over places 1 to m has the odd places as leaves, in order. The other tree is its mirror image (m even) or
shifted by one (m odd). In a broadcast or reduction the root is the parent of both trees; in all_reduce each
tree has a separate root. With n ranks and S bytes, in s slices, and h = floor(log2 n):

    broadcast    ceil(log2 n) + s - 1 rounds, a rank sends S; it may send to both children in one round
    reduce       at most 2 ceil(log2 n) + s - 2 rounds, a rank sends S; its children send one after the other
    all_reduce   at most 3h + s - 1 rounds, a rank sends 2 S: reduce, then broadcast, in both trees

The bytes of broadcast and reduce are optimal; with slices every rank sends and receives in every round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.program import Ints, Kind, Programs, Round, RoundSequence, log2_up, ranks, send
from commplan.collectives.transform import reversed_rounds


def _tree(m: int) -> tuple[Ints, Ints]:
    """The parents of places 1 to m, and whether each place is a right child.

    The children of place p = odd * b, with b a power of two, are at distance b/2. Its parent is at distance
    b, or further up if there is no such place.

    Returns:
        Parents [m], 0 for the root, and flags [m], 1 for right children and 0 for left ones.
    """
    position = np.arange(1, m + 1, dtype=np.int64)
    parent = position
    for _ in range(log2_up(m + 1)):
        step = parent & -parent
        above = np.where(parent & step << 1, parent - step, parent + step)
        parent = np.where((parent > m) | (parent == position), above, parent)
    return np.where(parent > m, 0, parent), (position > parent).astype(np.int64)


def _turns(parent: Ints, wait: Ints) -> Ints:
    """The round [m] in which each place receives from its parent: `wait` rounds after the earliest one."""
    turn = np.zeros_like(parent)
    for _ in range(len(parent).bit_length()):
        turn = np.where(parent > 0, turn[parent - 1] + 1 + wait, 0)
    return turn


def _rounds_down(m: int, first: int, *, staggered: bool) -> Iterator[Round]:
    """Both trees over ranks `first` to first + m - 1, from their roots down.

    A tree's root receives its half from rank 0 in round 0, unless the trees contain all ranks.
    """
    parent, right = _tree(m)
    turn = _turns(parent, right if staggered else 0 * right)
    position = ranks(m)
    # The rank at each position of the second tree.
    second = m - 1 - position if m % 2 == 0 else (position + 1) % m
    for step in range(int(turn.max(initial=-1)) + 1):
        is_active = (turn == step) & ((parent > 0) | (first > 0))
        trees = enumerate((position + first, second + first))
        sources = ((chunk, rank, np.where(parent > 0, rank[parent - 1], 0)) for chunk, rank in trees)
        yield tuple(send(source, rank, chunk, where=is_active) for chunk, rank, source in sources)


def _up(m: int, first: int) -> Iterator[Round]:
    return reversed_rounds(_rounds_down(m, first, staggered=True), reduce=True)


def _rounds_to_serve(m: int) -> int:
    """The number of rounds to serve a tree over m places, left children first; its left half is full."""
    levels = m.bit_length() - 1
    if levels < 1:
        return 0
    right_half = m - (1 << levels)
    return max(2 * levels - 1, 2 + _rounds_to_serve(right_half) if right_half else 0)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    match kind:
        case "broadcast":
            return log2_up(n), Fraction(min(n - 1, 1))
        case "reduce":
            return _rounds_to_serve(n - 1) + min(n - 1, 1), Fraction(min(n - 1, 1))
        case _:
            return _rounds_to_serve(n) + n.bit_length() - 1, Fraction(
                min(n, 4) // 2 if n != 3 else Fraction(3, 2)
            )


PROGRAMS: Programs = {
    "all_reduce": lambda n: RoundSequence(2, itertools.chain(_up(n, 0), _rounds_down(n, 0, staggered=False))),
    "broadcast": lambda n: RoundSequence(2, _rounds_down(n - 1, 1, staggered=False)),
    "reduce": lambda n: RoundSequence(2, _up(n - 1, 1)),
}
