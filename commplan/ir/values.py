"""The values of a schedule, as held by one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Meaning, Structure
from commplan.ir.types import Count, DType, Placement

Kind = Literal["tree", "array", "records", "flat"]


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One array of a value on one rank. `path` is its key path, joined by `/`; "" for an array."""

    path: Structure[str]
    shape: Structure[tuple[Count, ...]]
    dtype: Structure[DType]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.nbytes

    def rows(self, ways: int) -> Leaf:
        """The concatenation of `ways` such leaves along the leading dimension."""
        return Leaf(self.path, (*(ways * rows for rows in self.shape[:1]), *self.shape[1:]), self.dtype)

    def label(self, ref: Ref) -> str:
        """The name of this leaf of the value `ref` in messages."""
        return f"leaf `{self.path}` of `{name_of(ref)}`" if self.path else f"`{name_of(ref)}`"


class Value(msgspec.Struct, frozen=True, gc=False):
    """A value of the schedule, as held by one rank.

    `kind` is `tree` (a pytree, leaves in JAX's flattening order), `array` (one leaf), `records` (a loaded
    batch; its leaf has the local batch as leading dimension, and there is none for `bytes`) or `flat` (a
    one-dimensional buffer made by the compiler; one leaf). For a tree or array that is split, `whole` holds
    the leaves before the first split.
    """

    id: Structure[Ref]
    kind: Structure[Kind]
    leaves: Structure[tuple[Leaf, ...]]
    placement: Structure[Placement]
    whole: Structure[tuple[Leaf, ...]] = ()

    def of_types(self, dtypes: Sequence[DType]) -> Value:
        """This value with other element types."""
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
    """A range of elements of leaf `leaf` of `value`, and its offset in a buffer.

    Source and destination have the same number of rows (see `Pack`); `start`, `size` and `offset` are in
    elements within a row.
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
