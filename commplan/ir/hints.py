"""How a stage is to be carried out, as written in the plan, and the mathematics of a reduction."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

import msgspec

from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Execution, Meaning
from commplan.ir.types import DType


class Arg(msgspec.Struct, frozen=True, gc=False):
    """An argument of an algorithm: `readers = 2`, or without a key `gpu` in `hierarchical(gpu, node)`."""

    value: Execution[int | float | str]
    key: Execution[str | None] = None

    def __str__(self) -> str:
        return f"{self.key} = {self.value}" if self.key else str(self.value)


class Algorithm(msgspec.Struct, frozen=True, gc=False):
    """What stands behind `via`: how a stage is carried out."""

    name: Execution[str]
    args: Execution[tuple[Arg, ...]] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})" if self.args else self.name

    def get(self, key: str) -> int | float | str | None:
        return next((arg.value for arg in self.args if arg.key == key), None)

    @property
    def levels(self) -> tuple[tuple[str, Algorithm], ...]:
        """Axis and algorithm of each level of `hierarchical(..)`, innermost first; none of any other."""
        if self.name != "hierarchical":
            return ()
        return tuple(
            (arg.key, Algorithm(str(arg.value))) if arg.key else (str(arg.value), Algorithm("native"))
            for arg in self.args
        )


class Hints(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Hints and limits of one stage, as written in its braces. Sizes are bytes.

    overlap: what it runs beside: `backward`, and, where the compiler says so, `update`. integers: what a mean
    makes of leaves that are no floats: their maximum, or those of the first rank.
    """

    bucket: Execution[int | None] = None
    overlap: Execution[Literal["backward", "update"] | None] = None
    wire: Meaning[DType | None] = None
    accumulate: Meaning[DType | None] = None
    chunk: Execution[int | None] = None
    staleness: Meaning[int | None] = None
    on_error: Meaning[Literal["stop", "skip"] | None] = None
    on_failure: Meaning[Literal["stop", "continue"] | None] = None
    cores: Execution[int | None] = None
    prefetch: Execution[int | None] = None
    device_prefetch: Execution[int | None] = None
    integers: Meaning[Literal["max", "first"] | None] = None

    def wire_types(self, dtype: DType, *, adds: bool = True) -> tuple[DType, DType]:
        """The types in which values of `dtype` travel and are added.

        Only floats change. Values that are only moved (`adds` is false) never travel in a wider type than
        their own. A sum is never narrower than its terms on the wire; by default values are added in their
        own type.
        """
        if not dtype.is_float:
            return dtype, dtype
        wire = self.wire or dtype
        if not adds and wire.nbytes > dtype.nbytes:
            wire = dtype
        accumulate = self.accumulate or dtype
        return wire, accumulate if accumulate.nbytes >= wire.nbytes else wire

    def changes(self, dtype: DType) -> bool:
        """Whether sums of values of `dtype` travel or are added in another type."""
        return self.wire_types(dtype) != (dtype, dtype)

    def for_mean(self, dtypes: Collection[DType], via: Algorithm | None, *, is_weighted: bool) -> Hints:
        """The hints of a mean of leaves of `dtypes`: f16 is added in f32 unless the plan says otherwise, and
        so is bf16 if the mean is weighted.

        The mean of f16 values fits f16, their sum may not. An algorithm named by `via` adds in the type of
        its operand: values, which are divided first (`divides_first`), or the f32 terms of a weighted mean.
        """
        f16, bf16 = DType.F16 in dtypes, DType.BF16 in dtypes
        if self.accumulate is None and (f16 or bf16 if is_weighted else f16 and via is None):
            return msgspec.structs.replace(self, accumulate=DType.F64 if DType.F64 in dtypes else DType.F32)
        return self

    def product(self, dtype: DType) -> DType:
        """The type of the terms of a weighted mean of values of `dtype`: that in which they are added, if it
        is wider."""
        accumulate = self.wire_types(dtype)[1]
        return accumulate if accumulate.nbytes > dtype.nbytes else dtype

    def divides_first(self, dtype: DType) -> bool:
        """Whether a mean of values of `dtype` divides its terms and not their sum: a sum in f16 overflows."""
        return self.wire_types(dtype)[1] is DType.F16


def weight_type(weight: DType, dtypes: Collection[DType]) -> DType:
    """The float type in which weights of a mean of leaves of `dtypes` are added."""
    return DType.F64 if weight in (DType.F64, DType.I64) or DType.F64 in dtypes else DType.F32


NO_HINTS = Hints()


class Reduction(msgspec.Struct, frozen=True):
    """The mathematics of a reduction. `weight` is the numeric scalar of a weighted mean."""

    READS: ClassVar[tuple[str, ...]] = ("weight",)

    name: Meaning[Literal["sum", "mean", "max", "min"]]
    weight: Meaning[Ref | None] = None

    def text(self) -> str:
        """As it is written."""
        return f"{self.name}(weight = {name_of(self.weight)})" if self.weight else self.name
