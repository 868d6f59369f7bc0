"""The division of the leaves of trees into fragments. Each call of a phase works on one fragment.

A leaf of n elements is read in order as `ways` rows of m = ceil(n / ways) elements, padded at the end. With
c = ceil(m / F), fragment f of F owns columns f*c to f*c + c - 1 of each row, as far as they exist. The piece
of fragment f is a window of c columns of each row, beginning at column min(f*c, m - c), so that all pieces
have one shape. A window that begins before f*c repeats columns of other fragments, which merging ignores.

There are several rows if ranks along an axis own a row of the leaf each. Then the piece of a row is the same
row of the piece.
"""

from __future__ import annotations

from typing import NamedTuple

from commplan.ir.values import Leaf


def is_divisible(leaf: Leaf, rows: tuple[str, ...]) -> bool:
    """Whether a leaf can be cut into fragments.

    Every leaf with a dimension can. A scalar of floats is a leaf of one element, but cannot be cut into rows.
    A scalar of integers is most likely a count of steps, and fragments make different numbers of steps.

    Args:
        leaf: The leaf.
        rows: The axes whose ranks own a row of each leaf; empty if there is a single row.
    """
    return bool(leaf.shape) or (not rows and leaf.dtype.is_float)


class FragmentLayout(NamedTuple):
    """The division of leaves into fragments.

    Attributes:
        fragments: The number of fragments (F), at least 1.
        ways: The number of rows of each leaf.
    """

    fragments: int
    ways: int = 1

    def row(self, size: int) -> int:
        """The number of elements in a row of a leaf of `size` elements, with padding (m)."""
        return -(-size // self.ways)

    def columns(self, size: int) -> int:
        """The number of columns of a fragment of a leaf of `size` elements (c)."""
        return -(-self.row(size) // self.fragments)

    def piece(self, leaf: Leaf) -> Leaf:
        """The type of a piece of `leaf`, [ways * c]. The piece of a single fragment is the leaf itself."""
        if self.fragments == 1:
            return leaf
        return Leaf(leaf.path, (self.ways * self.columns(leaf.size),), leaf.dtype)
