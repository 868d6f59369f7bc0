"""double_tree: two binary trees, each for half of the buffer; inner nodes of one are leaves of the other.

Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009). A
tree over places 1 to m has the odd places as leaves. The other tree is its mirror image (m even) or shifted
by one place (m odd). In a broadcast or reduction the trees contain all ranks except the root, which is the
parent of the roots of both trees. In all_reduce they contain all ranks. With n ranks, S bytes in s slices,
and h = floor(log2 n):

    broadcast    ceil(log2 n) + s - 1 rounds, a rank sends S; it may send to both children in one round
    reduce       at most 2 ceil(log2 n) + s - 2 rounds, a rank sends S; its children send one after the other
    all_reduce   at most 3h + s - 1 rounds, a rank sends 2 S: reduce, then broadcast, in both trees

The bytes of broadcast and reduce are optimal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.program import Ints, Kind, Programs, Round, RoundSequence, log2_up, rank_range, send
from commplan.collectives.transform import reversed_rounds


def _tree(m: int) -> tuple[Ints, Ints]:
    """The parents of places 1 to m, and whether each place is a right child.

    The children of place p = odd * b, with b a power of two, are at distance b/2. Its parent is at distance
    b, or further up if there is no such place.

    Returns:
        Parents [m], 0 for the root, and flags [m], 1 for right children and 0 for left ones and the root.
    """
    place = np.arange(1, m + 1, dtype=np.int64)
    parent = place
    for _ in range(log2_up(m + 1)):
        lowest_bit = parent & -parent
        above = np.where(parent & lowest_bit << 1, parent - lowest_bit, parent + lowest_bit)
        parent = np.where((parent > m) | (parent == place), above, parent)
    return np.where(parent > m, 0, parent), (place > parent).astype(np.int64)


def _turns(parent: Ints, wait: Ints) -> Ints:
    """The round [m] when each place receives from its parent; 0 for the root of the tree.

    Args:
        parent: As returned by `_tree`.
        wait: The delay [m] of the parent's message after the earliest possible round, in rounds.
    """
    turn = np.zeros_like(parent)
    for _ in range(len(parent).bit_length()):
        turn = np.where(parent > 0, turn[parent - 1] + 1 + wait, 0)
    return turn


def _rounds_down(m: int, first: int, *, staggered: bool) -> Iterator[Round]:
    """Both trees over ranks `first` to first + m - 1, from their roots down.

    If `first` is 1, rank 0 sends each tree's half to the root of the tree in round 0. If it is 0, the trees
    contain all ranks, and round 0 is empty.

    Args:
        m: The number of ranks in each tree.
        first: The first of these ranks, 0 or 1.
        staggered: Whether a node serves its right child one round after the left one, instead of both at
            once.
    """
    parent, right = _tree(m)
    turn = _turns(parent, right if staggered else 0 * right)
    # The ranks, counted from `first`, at places 1 to m of both trees.
    first_order = rank_range(m)
    second_order = m - 1 - first_order if m % 2 == 0 else (first_order + 1) % m
    for time in range(int(turn.max(initial=-1)) + 1):
        is_active = (turn == time) & ((parent > 0) | (first > 0))
        trees = enumerate((first_order + first, second_order + first))
        sources = ((chunk, rank, np.where(parent > 0, rank[parent - 1], 0)) for chunk, rank in trees)
        yield tuple(send(source, rank, chunk, where=is_active) for chunk, rank, source in sources)


def _rounds_up(m: int, first: int) -> Iterator[Round]:
    """The reduction along both trees: `_rounds_down` in reverse, where children send one after the other."""
    return reversed_rounds(_rounds_down(m, first, staggered=True), reduce=True)


def _rounds_to_serve(m: int) -> int:
    """The number of rounds to serve a tree over m places, left children one round before right ones."""
    # The root is place 2**levels: its left subtree is full, its right one has the other m - 2**levels places.
    levels = m.bit_length() - 1
    if levels < 1:
        return 0
    right_half = m - (1 << levels)
    return max(2 * levels - 1, 2 + _rounds_to_serve(right_half) if right_half else 0)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    match kind:
        case "broadcast":
            return log2_up(n), Fraction(min(n - 1, 1))
        case "reduce":
            return _rounds_to_serve(n - 1) + min(n - 1, 1), Fraction(min(n - 1, 1))
        case _:
            # An inner node with a parent and two children sends 3/2 S in its tree, and S/2 as a leaf of the
            # other. Trees of fewer than four ranks have no such node.
            largest = Fraction(3, 2) if n == 3 else Fraction(min(n, 4) // 2)
            return _rounds_to_serve(n) + n.bit_length() - 1, largest


PROGRAMS: Programs = {
    "all_reduce": lambda n: RoundSequence(
        2, itertools.chain(_rounds_up(n, 0), _rounds_down(n, 0, staggered=False))
    ),
    "broadcast": lambda n: RoundSequence(2, _rounds_down(n - 1, 1, staggered=False)),
    "reduce": lambda n: RoundSequence(2, _rounds_up(n - 1, 1)),
}
