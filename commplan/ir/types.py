"""Types and placements: what a value is, and how it lies over the axes of a plan."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec

from commplan.ir.roles import Meaning, Structure

LARGEST = 2**63 - 1  # what indices, and counts of ranks and of bytes, can hold
MOST_SERVERS = 2**16  # each is gone through by itself

# What a file holds is checked against these as it is read: names become parts of paths, of names of shared
# memory and of what is printed.
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
Ref = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_./~-]*\Z")]  # the id of a value: "grads.1"
Refs = Annotated[tuple[Ref, ...], msgspec.Meta(min_length=1)]
Over = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]  # axes, at least one
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]  # of elements, or of records
Batch = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
EntryRef = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.0\Z")]  # of an input or a state
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Printed = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]


class DType(enum.StrEnum):
    """An element type of the language."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    BOOL = "bool"
    I8 = "i8"
    I16 = "i16"
    U16 = "u16"
    U32 = "u32"

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return _NBYTES[self]

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.BF16, DType.F16, DType.F64)

    @property
    def is_only_moved(self) -> bool:
        """Whether plans move its values and do not reduce them."""
        return self in (DType.I8, DType.I16, DType.U16, DType.U32)

    @property
    def numpy_name(self) -> str:
        """The name that NumPy (with ml_dtypes for bfloat16) gives it."""
        return _NUMPY[self]

    @classmethod
    def of(cls, name: str) -> DType | None:
        """The type that NumPy calls `name` (or that the language calls so), if there is one."""
        return _BY_NUMPY.get(name)


_NBYTES = {
    DType.F32: 4, DType.BF16: 2, DType.F16: 2, DType.F64: 8,
    DType.I32: 4, DType.I64: 8, DType.U8: 1, DType.BOOL: 1,
    DType.I8: 1, DType.I16: 2, DType.U16: 2, DType.U32: 4,
}  # fmt: skip
_NUMPY = {
    DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16", DType.F64: "float64",
    DType.I32: "int32", DType.I64: "int64", DType.U8: "uint8", DType.BOOL: "bool",
    DType.I8: "int8", DType.I16: "int16", DType.U16: "uint16", DType.U32: "uint32",
}  # fmt: skip
_BY_NUMPY = {name: dtype for dtype, name in _NUMPY.items()} | {str(dtype): dtype for dtype in _NUMPY}


class AxisKind(enum.StrEnum):
    """What stands along an axis: replicas, the members of an ensemble, or servers, which hold no ranks."""

    REPLICA = "axis"
    ENSEMBLE = "ensemble"
    SERVER = "server"


class ArrayType(msgspec.Struct, frozen=True, tag="array"):
    """An array with written dimensions (global: before any placement cuts or repeats it)."""

    dtype: Meaning[DType]
    shape: Meaning[tuple[Count, ...]] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else str(self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class BytesType(msgspec.Struct, frozen=True, tag="bytes"):
    """One record of variable length."""

    def __str__(self) -> str:
        return "bytes"


class TreeType(msgspec.Struct, frozen=True, tag="tree"):
    """A pytree whose leaves are bound when the plan is compiled."""

    def __str__(self) -> str:
        return "tree"


Element = ArrayType | BytesType | TreeType


class RecordsType(msgspec.Struct, frozen=True, tag="records"):
    """A loaded value: a batch of records.

    `batch` is the global number of records a step, one number, or one per member where members
    have clocks of their own.
    """

    batch: Meaning[Batch]
    element: Meaning[ArrayType | BytesType | TreeType]

    def __str__(self) -> str:
        batch = str(self.batch[0]) if len(self.batch) == 1 else f"[{', '.join(map(str, self.batch))}]"
        return f"{batch} x {self.element}"


Type = ArrayType | BytesType | TreeType | RecordsType


class Placement(msgspec.Struct, frozen=True, gc=False):
    """How a value lies over the axes: `same` on each axis that is not named here.

    `per` and `partial` stand in the order in which the plan declares the axes; `split` is one
    ordered list, major first: the leading dimension is cut along its first axis, then its second.
    `stacked`: the leading rows of a flat buffer are those of the ranks along these axes, of each one
    the row that this rank was sent.
    """

    per: Structure[tuple[str, ...]] = ()
    partial: Structure[tuple[str, ...]] = ()
    split: Structure[tuple[str, ...]] = ()
    server: Structure[str | None] = None
    stacked: Structure[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return " ".join(self.words()) or "same"

    def words(self, write: Callable[[str], str] = str) -> list[str]:
        """One of `per a, b`, `split c` or `on SERVER` for each thing that it says."""
        words = [
            f"{word} {', '.join(map(write, axes))}"
            for word in ("per", "partial", "split", "stacked")
            if (axes := getattr(self, word))
        ]
        return [*words, f"on {write(self.server)}"] if self.server is not None else words

    @property
    def varying(self) -> tuple[str, ...]:
        """Every axis along which ranks hold different data."""
        return self.per + self.partial + self.split + self.stacked

    def varies(self, axis: str) -> bool:
        return axis in self.per or axis in self.partial or axis in self.split or axis in self.stacked

    def same_over(self, axes: Iterable[str]) -> Placement:
        """This placement with `axes` no longer per or partial: what a reduction or broadcast leaves."""
        bare = self.without(axes)
        return msgspec.structs.replace(bare, split=self.split, stacked=self.stacked)

    def without(self, axes: Iterable[str]) -> Placement:
        """This placement, the same over `axes`."""
        gone = frozenset(axes)
        if gone.isdisjoint(self.varying):
            return self
        fields = (self.per, self.partial, self.split, self.stacked)
        per, partial, split, stacked = (tuple(a for a in axes if a not in gone) for axes in fields)
        return Placement(per, partial, split, self.server, stacked)


SAME = Placement()


def timed(seconds: float) -> str:
    """A time in the largest unit that leaves it readable: `1.83 s`, `3.2 ms`, `45 us`, `0 us`."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    return _in_units(seconds, units) or (f"{seconds * 1e9:.2g} ns" if seconds else "0 us")


def sized(nbytes: float) -> str:
    """A number of bytes in the largest unit that leaves it readable: `25 MiB`, `1.5 KiB`, `12 B`."""
    return _in_units(nbytes, (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))) or f"{nbytes:.4g} B"


def _in_units(number: float, units: Iterable[tuple[str, float]]) -> str | None:
    """`number` in the first of `units` that it has one of."""
    for unit, scale in units:
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 1000 * scale else f"{number / scale:.0f} {unit}"
    return None
