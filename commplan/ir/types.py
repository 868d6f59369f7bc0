"""Types and placements of values."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from commplan.ir.roles import Meaning, Structure

LARGEST = 2**63 - 1  # the largest index, number of ranks or number of bytes
MOST_SERVERS = 2**16  # some analyses visit servers one at a time

# Patterns that are checked when a file is read. Names become parts of paths, of shared-memory names and of
# output.
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
# The id of a value, such as "grads.1".
Ref = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_./~-]*\Z")]
Refs = Annotated[tuple[Ref, ...], msgspec.Meta(min_length=1)]
Over = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]  # one or more axes
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]  # of elements or records
Batch = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
# The id of an input or a state.
EntryRef = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.0\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
# Words of the language in fields of stages and ops.
Operator = Literal["sum", "mean", "max", "min"]  # of reductions
ServedMode = Literal["round_robin", "async", "hogwild"]  # of elastic averaging by a server
ElasticMode = Literal["sync", ServedMode]
Visit = Literal["exactly_once", "at_least_once", "at_most_once"]
Tail = Literal["pad", "short", "drop"]
Processor = Literal["host", "device"]  # that runs a function
OnFailure = Literal["stop", "continue"]  # if a process that shares input dies
PhaseKind = Literal["start", "step", "every", "named"]
Status = Literal["same", "per", "partial", "split"]  # the placement of a value along one axis
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
        """Bytes per element."""
        return _NBYTES[self]

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.BF16, DType.F16, DType.F64)

    @property
    def is_only_moved(self) -> bool:
        """Whether plans can move values of this type but not reduce them."""
        return self in (DType.I8, DType.I16, DType.U16, DType.U32)

    @property
    def numpy_name(self) -> str:
        """The NumPy name of the type (with ml_dtypes for bfloat16)."""
        return _NUMPY[self]

    @classmethod
    def from_name(cls, name: str) -> DType | None:
        """The type with this NumPy or plan name, or None."""
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
    """The kind of an axis: replicas, members of an ensemble, or servers, which have no ranks."""

    REPLICA = "axis"
    ENSEMBLE = "ensemble"
    SERVER = "server"


class ArrayType(msgspec.Struct, frozen=True, tag="array"):
    """An array with its global shape, before any placement splits or repeats it."""

    dtype: Meaning[DType]
    shape: Meaning[tuple[Count, ...]] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else str(self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class BytesType(msgspec.Struct, frozen=True, tag="bytes"):
    """A record of variable length."""

    def __str__(self) -> str:
        return "bytes"


class TreeType(msgspec.Struct, frozen=True, tag="tree"):
    """A pytree whose leaves are bound when the plan is compiled."""

    def __str__(self) -> str:
        return "tree"


Element = ArrayType | BytesType | TreeType


class RecordsType(msgspec.Struct, frozen=True, tag="records"):
    """A batch of loaded records.

    `batch` is the global number of records per step: one number, or one per member if members load at their
    own rates.
    """

    batch: Meaning[Batch]
    element: Meaning[ArrayType | BytesType | TreeType]

    def __str__(self) -> str:
        batch = str(self.batch[0]) if len(self.batch) == 1 else f"[{', '.join(map(str, self.batch))}]"
        return f"{batch} x {self.element}"


Type = ArrayType | BytesType | TreeType | RecordsType


class AnyType(msgspec.Struct, frozen=True, tag="any"):
    """The type of operands and results of a built-in function without declared types: an array or a tree."""

    def __str__(self) -> str:
        return "any"


FnElement = ArrayType | BytesType | TreeType | AnyType  # the type of an operand or result of a function


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The placement of a value over the axes: `same` on each axis that is not named here.

    `per` and `partial` are in declaration order. `split` is ordered, major first: the leading dimension is
    split along the first axis, then along the second. `stacked` axes mean that the leading rows of a flat
    buffer are those that this rank received from each rank along these axes.
    """

    per: Structure[tuple[str, ...]] = ()
    partial: Structure[tuple[str, ...]] = ()
    split: Structure[tuple[str, ...]] = ()
    server: Structure[str | None] = None
    stacked: Structure[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return " ".join(self.words()) or "same"

    def words(self, write: Callable[[str], str] = str) -> list[str]:
        """The non-empty parts: `per a, b`, `split c`, `on SERVER`, and so on."""
        words = [
            f"{word} {', '.join(map(write, axes))}"
            for word in ("per", "partial", "split", "stacked")
            if (axes := getattr(self, word))
        ]
        return [*words, f"on {write(self.server)}"] if self.server is not None else words

    @property
    def varying(self) -> tuple[str, ...]:
        """The axes along which ranks hold different data."""
        return self.per + self.partial + self.split + self.stacked

    def varies(self, axis: str) -> bool:
        return axis in self.per or axis in self.partial or axis in self.split or axis in self.stacked

    def same_over(self, axes: Iterable[str]) -> Placement:
        """This placement with `axes` no longer per or partial, as after a reduction or broadcast."""
        bare = self.without(axes)
        return msgspec.structs.replace(bare, split=self.split, stacked=self.stacked)

    def without(self, axes: Iterable[str]) -> Placement:
        """This placement, but the same over `axes`."""
        removed = frozenset(axes)
        if removed.isdisjoint(self.varying):
            return self
        fields = (self.per, self.partial, self.split, self.stacked)
        per, partial, split, stacked = (tuple(a for a in axes if a not in removed) for axes in fields)
        return Placement(per, partial, split, self.server, stacked)


SAME = Placement()


def timed(seconds: float) -> str:
    """Format a time with a readable unit: `1.83 s`, `3.2 ms`, `45 us`, `0 us`."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    return _in_units(seconds, units) or (f"{seconds * 1e9:.2g} ns" if seconds else "0 us")


def sized(nbytes: float) -> str:
    """Format a number of bytes with a readable unit: `25 MiB`, `1.5 KiB`, `12 B`."""
    return _in_units(nbytes, (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))) or f"{nbytes:.4g} B"


def _in_units(number: float, units: Iterable[tuple[str, float]]) -> str | None:
    """`number` in the largest of `units` that does not exceed it, or None."""
    for unit, scale in units:
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 1000 * scale else f"{number / scale:.0f} {unit}"
    return None
