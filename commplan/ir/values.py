"""The values of a schedule, as held by one rank: their leaves, placements and parts.

Shapes are those of one rank. `per` dimensions are stripped, and `split` leaves are cut and padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Meaning, Structure
from commplan.ir.types import Count, DType, Placement

# The kind of a value; see `Value`.
Kind = Literal["tree", "array", "records", "flat"]


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One array of a value on one rank.

    Attributes:
        path: The key path in the tree, joined by `/`; empty for a value that is a single array.
        shape: The shape on one rank; () for a scalar.
        dtype: The element type.
    """

    path: Structure[str]
    shape: Structure[tuple[Count, ...]]
    dtype: Structure[DType]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.nbytes

    def rows(self, ways: int) -> Leaf:
        """The concatenation of `ways` such leaves along the leading dimension; a scalar is unchanged."""
        return Leaf(self.path, (*(ways * rows for rows in self.shape[:1]), *self.shape[1:]), self.dtype)

    def label(self, ref: Ref) -> str:
        """The name of this leaf of the value `ref` in messages."""
        return f"leaf `{self.path}` of `{name_of(ref)}`" if self.path else f"`{name_of(ref)}`"


class Value(msgspec.Struct, frozen=True, gc=False):
    """A value of the schedule, as held by one rank.

    Attributes:
        id: The name of the value: that of the plan, with a suffix after `/` or `~` for values of passes.
        kind: The kind of value:

            - `tree`: a pytree, with leaves in JAX's flattening order.
            - `array`: a single leaf.
            - `records`: a batch of records, or a tree with a batch. The leading dimension of leaves is the
              local batch. Records of `bytes` have no leaf.
            - `flat`: a one-dimensional buffer made by the compiler, with one leaf.
        leaves: The leaves on one rank.
        placement: The placement over the axes.
        whole: The leaves before the first split, if the value is a tree or array that is split; else empty.
    """

    id: Structure[Ref]
    kind: Structure[Kind]
    leaves: Structure[tuple[Leaf, ...]]
    placement: Structure[Placement]
    whole: Structure[tuple[Leaf, ...]] = ()

    def of_types(self, dtypes: Sequence[DType]) -> Value:
        """This value with other element types, one in `dtypes` for each leaf."""
        pairs = list(zip(self.leaves, dtypes, strict=False))
        if all(leaf.dtype == dtype for leaf, dtype in pairs):
            return self
        whole = zip(self.whole, dtypes, strict=False)
        return msgspec.structs.replace(
            self,
            leaves=tuple(Leaf(leaf.path, leaf.shape, dtype) for leaf, dtype in pairs),
            whole=tuple(Leaf(leaf.path, leaf.shape, dtype) for leaf, dtype in whole),
        )

    @property
    def uncut(self) -> tuple[Leaf, ...]:
        """The leaves before any split."""
        return self.whole or self.leaves

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's copy."""
        return sum(leaf.nbytes for leaf in self.leaves)


class Part(msgspec.Struct, frozen=True, gc=False):
    """A range of elements of a leaf, and its place in a flat buffer, for `Pack` and `Unpack`.

    Leaf and buffer are viewed as the same number of rows (see `Pack`), and the range is one of columns.

    Attributes:
        value: The value with the leaf for `Pack`; the buffer for `Unpack`.
        leaf: The index of the leaf.
        start: The first element in a row of the leaf.
        size: The number of elements in a row, at least 1.
        offset: The first element in a row of the buffer.
    """

    READS: ClassVar[tuple[str, ...]] = ("value",)

    value: Meaning[Ref]
    leaf: Meaning[int]
    start: Meaning[int]
    size: Meaning[int]
    offset: Meaning[int]


def widest(leaves: tuple[Leaf, ...]) -> DType:
    """The widest element type among `leaves`; f32 if there are none."""
    return max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.nbytes, default=DType.F32)
