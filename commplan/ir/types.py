"""Types and placements of values, and the words and names that fields of both graphs may have."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from commplan.ir.roles import Meaning, Structure

# The largest index, number of ranks or number of bytes.
LARGEST = 2**63 - 1
# The maximum number of servers of a declaration, because some analyses visit servers one at a time.
MOST_SERVERS = 2**16

# Restrictions that are checked when a file is read. Names become parts of paths, of shared-memory names and
# of output.
#
# A name in a plan.
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
# The id of a value, such as "grads.1".
Ref = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_./~-]*\Z")]
# One or more values.
Refs = Annotated[tuple[Ref, ...], msgspec.Meta(min_length=1)]
# One or more axes.
Over = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
# A number of elements or records.
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
# The number of records per step: one number, or one for each member of an ensemble.
Batch = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
# The id of an input, or of a state on entry to a phase.
EntryRef = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.0\Z")]
# A SHA-256 in hex.
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
# A text that is shown to people, without control characters.
Printed = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]

# Words of the language in fields of stages and ops.
#
# The operator of a reduction.
Operator = Literal["sum", "mean", "max", "min"]
# How a server orders the workers of an elastic averaging.
ServedMode = Literal["round_robin", "async", "hogwild"]
# How workers update the center of an elastic averaging: all at once, or one after another on a server.
ElasticMode = Literal["sync", ServedMode]
# How often a load visits each record in an epoch.
Visit = Literal["exactly_once", "at_least_once", "at_most_once"]
# The last batch of an epoch, if records are left: padded, short, or left out.
Tail = Literal["pad", "short", "drop"]
# The processor that runs a function.
Processor = Literal["host", "device"]
# Whether the other processes go on if one that shares input dies.
OnFailure = Literal["stop", "continue"]
# `at start`, `each step`, `every N steps`, or `phase NAME`.
PhaseKind = Literal["start", "step", "every", "named"]
# The placement of a value along one axis.
Status = Literal["same", "per", "partial", "split"]


class DType(enum.StrEnum):
    """An element type of the language. The value is its name in a plan."""

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
        """Whether it is a floating-point type."""
        return self in (DType.F32, DType.BF16, DType.F16, DType.F64)

    @property
    def is_only_moved(self) -> bool:
        """Whether plans can move values of this type but not reduce them."""
        return self in (DType.I8, DType.I16, DType.U16, DType.U32)

    @property
    def numpy_name(self) -> str:
        """The NumPy name of the type. NumPy has `bfloat16` only with ml_dtypes."""
        return _NUMPY[self]

    @classmethod
    def from_name(cls, name: str) -> DType | None:
        """The type with this NumPy or plan name, or None if there is none."""
        return _BY_NUMPY.get(name)


# Bytes per element.
_NBYTES = {
    DType.F32: 4, DType.BF16: 2, DType.F16: 2, DType.F64: 8,
    DType.I32: 4, DType.I64: 8, DType.U8: 1, DType.BOOL: 1,
    DType.I8: 1, DType.I16: 2, DType.U16: 2, DType.U32: 4,
}  # fmt: skip
# NumPy names.
_NUMPY = {
    DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16", DType.F64: "float64",
    DType.I32: "int32", DType.I64: "int64", DType.U8: "uint8", DType.BOOL: "bool",
    DType.I8: "int8", DType.I16: "int16", DType.U16: "uint16", DType.U32: "uint32",
}  # fmt: skip
# Types by NumPy name and by plan name.
_BY_NUMPY = {name: dtype for dtype, name in _NUMPY.items()} | {str(dtype): dtype for dtype in _NUMPY}


class AxisKind(enum.StrEnum):
    """The kind of an axis. The value is its word in a plan.

    Attributes:
        REPLICA: An axis of the mesh.
        ENSEMBLE: The members of an ensemble, an axis of the mesh too.
        SERVER: Servers, processes outside of the mesh.
    """

    REPLICA = "axis"
    ENSEMBLE = "ensemble"
    SERVER = "server"


class ArrayType(msgspec.Struct, frozen=True, tag="array"):
    """An array.

    Attributes:
        dtype: The element type.
        shape: The global shape, before any placement splits or repeats the array; () for a scalar.
    """

    dtype: Meaning[DType]
    shape: Meaning[tuple[Count, ...]] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else str(self.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class BytesType(msgspec.Struct, frozen=True, tag="bytes"):
    """A record of bytes, of variable length."""

    def __str__(self) -> str:
        return "bytes"


class TreeType(msgspec.Struct, frozen=True, tag="tree"):
    """A pytree whose leaves are bound when the plan is compiled."""

    def __str__(self) -> str:
        return "tree"


# The type of one record, or of a value that is no batch of records.
Element = ArrayType | BytesType | TreeType


class RecordsType(msgspec.Struct, frozen=True, tag="records"):
    """A batch of loaded records.

    Attributes:
        batch: The global number of records per step: one number, or one per member if members load at their
            own rates.
        element: The type of one record.
    """

    batch: Meaning[Batch]
    element: Meaning[ArrayType | BytesType | TreeType]

    def __str__(self) -> str:
        batch = str(self.batch[0]) if len(self.batch) == 1 else f"[{', '.join(map(str, self.batch))}]"
        return f"{batch} x {self.element}"


# The type of a value of a plan.
Type = ArrayType | BytesType | TreeType | RecordsType


class AnyType(msgspec.Struct, frozen=True, tag="any"):
    """The type of operands and results of a built-in function without declared types: an array or a tree."""

    def __str__(self) -> str:
        return "any"


# The type of an operand or result of a function.
FnElement = ArrayType | BytesType | TreeType | AnyType


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The placement of a value over the axes. Along axes that are not listed, all ranks have the same value.

    Attributes:
        per: The axes along which ranks have independent values, in declaration order.
        partial: The axes along which ranks have terms of a sum, in declaration order.
        split: The axes along which the value is split, major first: it is split along the first axis, and
            each shard along the second.
        server: The server declaration, if the value is on servers; None if it is on workers.
        stacked: For a flat buffer, the axes of an all-to-all: the leading rows are those that this rank
            received from each rank along these axes.
    """

    per: Structure[tuple[str, ...]] = ()
    partial: Structure[tuple[str, ...]] = ()
    split: Structure[tuple[str, ...]] = ()
    server: Structure[str | None] = None
    stacked: Structure[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return " ".join(self.words()) or "same"

    def words(self, write: Callable[[str], str] = str) -> list[str]:
        """The non-empty parts: `per a, b`, `split c`, `on SERVER`, and so on; empty if it is `same`.

        Args:
            write: A function that formats the name of an axis or server.
        """
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
        """Whether ranks along `axis` hold different data."""
        return axis in self.per or axis in self.partial or axis in self.split or axis in self.stacked

    def same_over(self, axes: Iterable[str]) -> Placement:
        """This placement with `axes` removed from `per` and `partial`, as after a reduction or broadcast."""
        bare = self.without(axes)
        return msgspec.structs.replace(bare, split=self.split, stacked=self.stacked)

    def without(self, axes: Iterable[str]) -> Placement:
        """This placement with `axes` removed from all fields but `server`."""
        removed = frozenset(axes)
        if removed.isdisjoint(self.varying):
            return self
        fields = (self.per, self.partial, self.split, self.stacked)
        per, partial, split, stacked = (
            tuple(axis for axis in field if axis not in removed) for field in fields
        )
        return Placement(per, partial, split, self.server, stacked)


# The placement of a value that is the same on all ranks.
SAME = Placement()


def timed(seconds: float) -> str:
    """Format a time, at least 0, with a readable unit: `1.83 s`, `3.2 ms`, `45 us`, `0 us`."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    return _in_units(seconds, units) or (f"{seconds * 1e9:.2g} ns" if seconds else "0 us")


def sized(nbytes: float) -> str:
    """Format a number of bytes with a readable unit: `25 MiB`, `1.5 KiB`, `12 B`."""
    return _in_units(nbytes, (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))) or f"{nbytes:.4g} B"


def _in_units(number: float, units: Iterable[tuple[str, float]]) -> str | None:
    """`number` in the largest of `units`, largest first, that does not exceed it; None if all exceed it."""
    for unit, scale in units:
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 1000 * scale else f"{number / scale:.0f} {unit}"
    return None
