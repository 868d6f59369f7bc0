"""Execution hints of a stage, and the operators of reductions."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

import msgspec

from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Execution, Meaning
from commplan.ir.types import DType, OnFailure, Operator, sized


class Arg(msgspec.Struct, frozen=True, gc=False):
    """An argument of an algorithm: `readers = 2`, or without a key `gpu` in `hierarchical(gpu, node)`."""

    value: Execution[int | float | str]
    key: Execution[str | None] = None

    def __str__(self) -> str:
        return f"{self.key} = {self.value}" if self.key else str(self.value)


class Algorithm(msgspec.Struct, frozen=True, gc=False):
    """The algorithm that implements a stage, as in a `via` clause."""

    name: Execution[str]
    args: Execution[tuple[Arg, ...]] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})" if self.args else self.name

    def get(self, key: str) -> int | float | str | None:
        return next((arg.value for arg in self.args if arg.key == key), None)

    @property
    def levels(self) -> tuple[tuple[str, Algorithm], ...]:
        """The axis and algorithm of each level of `hierarchical(..)`, innermost first; else empty."""
        if self.name != "hierarchical":
            return ()
        return tuple(
            (arg.key, Algorithm(str(arg.value))) if arg.key else (str(arg.value), Algorithm("native"))
            for arg in self.args
        )


class Cache(msgspec.Struct, frozen=True, gc=False):
    """Where the results of a host function are kept across epochs: in at most `nbytes` of the host's memory,
    or of the file at `path`."""

    nbytes: Execution[int]
    path: Execution[str | None] = None

    def __str__(self) -> str:
        return sized(self.nbytes) if self.path is None else f'disk("{self.path}", {sized(self.nbytes)})'


class Hints(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The options of one stage, as in its braces. Sizes are in bytes.

    `overlap` names the computation that the stage overlaps with: `backward`, or `update` if the compiler
    chose so. `integers` is the treatment of integer leaves in a mean: their maximum, or the values of the
    first rank.
    """

    bucket: Execution[int | None] = None
    overlap: Execution[Literal["backward", "update"] | None] = None
    wire: Meaning[DType | None] = None
    accumulate: Meaning[DType | None] = None
    chunk: Execution[int | None] = None
    staleness: Meaning[int | None] = None
    on_error: Meaning[Literal["stop", "skip"] | None] = None
    on_failure: Meaning[OnFailure | None] = None
    cores: Execution[int | None] = None
    prefetch: Execution[int | None] = None
    device_prefetch: Execution[int | None] = None
    integers: Meaning[Literal["max", "first"] | None] = None
    cache: Execution[Cache | None] = None

    def wire_types(self, dtype: DType, *, adds: bool = True) -> tuple[DType, DType]:
        """The types in which values of `dtype` are sent and added.

        Only floats change type. Values that are moved without addition (`adds` is False) are never sent in a
        wider type. The accumulator is at least as wide as the wire type and defaults to `dtype`.

        Args:
            dtype: The type of the values.
            adds: Whether the values are added.

        Returns:
            The wire type and the accumulation type.
        """
        if not dtype.is_float:
            return dtype, dtype
        wire = self.wire or dtype
        if not adds and wire.nbytes > dtype.nbytes:
            wire = dtype
        accumulate = self.accumulate or dtype
        return wire, accumulate if accumulate.nbytes >= wire.nbytes else wire

    def changes(self, dtype: DType) -> bool:
        """Whether sums of values of `dtype` are sent or added in another type."""
        return self.wire_types(dtype) != (dtype, dtype)

    def for_mean(self, dtypes: Collection[DType], via: Algorithm | None, *, is_weighted: bool) -> Hints:
        """The hints of a mean of leaves of `dtypes`.

        Without `accumulate`, f16 values are added in f32, and bf16 values too if the mean is weighted: the
        mean of f16 values fits in f16, but their sum may not. An algorithm named by `via` adds in the type of
        its operand, so an unweighted mean divides the values first (`divides_first`), and a weighted one adds
        f32 terms.
        """
        f16, bf16 = DType.F16 in dtypes, DType.BF16 in dtypes
        if self.accumulate is None and (f16 or bf16 if is_weighted else f16 and via is None):
            return msgspec.structs.replace(self, accumulate=DType.F64 if DType.F64 in dtypes else DType.F32)
        return self

    def term_type(self, dtype: DType) -> DType:
        """The type of the terms of a weighted mean: the wider of `dtype` and the accumulation type."""
        accumulate = self.wire_types(dtype)[1]
        return accumulate if accumulate.nbytes > dtype.nbytes else dtype

    def divides_first(self, dtype: DType) -> bool:
        """Whether a mean of `dtype` divides its terms instead of their sum, since a sum in f16 overflows."""
        return self.wire_types(dtype)[1] is DType.F16


def weight_type(weight: DType, dtypes: Collection[DType]) -> DType:
    """The float type in which the weights of a mean of leaves of `dtypes` are added."""
    return DType.F64 if weight in (DType.F64, DType.I64) or DType.F64 in dtypes else DType.F32


NO_HINTS = Hints()


class Reduction(msgspec.Struct, frozen=True):
    """The operator of a reduction. `weight` is the numeric scalar of a weighted mean."""

    READS: ClassVar[tuple[str, ...]] = ("weight",)

    name: Meaning[Operator]
    weight: Meaning[Ref | None] = None

    def text(self) -> str:
        """The source text of the operator."""
        return f"{self.name}(weight = {name_of(self.weight)})" if self.weight else self.name
