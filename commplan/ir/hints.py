"""The options of a stage in its braces, its algorithm, and the operators of reductions."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

import msgspec

from commplan.ir.codec import Codec
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Execution, Meaning
from commplan.ir.types import DType, OnFailure, Operator, sized


class Arg(msgspec.Struct, frozen=True, gc=False):
    """An argument of an algorithm: `readers = 2`, or `gpu` in `hierarchical(gpu, node)`.

    Attributes:
        value: The value after `=`, or the argument itself.
        key: The key before `=`; None if there is none.
    """

    value: Execution[int | float | str]
    key: Execution[str | None] = None

    def __str__(self) -> str:
        return f"{self.key} = {self.value}" if self.key else str(self.value)


class Algorithm(msgspec.Struct, frozen=True, gc=False):
    """The algorithm that implements a stage, as in a `via` clause.

    Attributes:
        name: `native`, `hierarchical`, or the name of a chunk program, of owners or of a sharing design.
        args: The arguments in parentheses; empty if there are none.
    """

    name: Execution[str]
    args: Execution[tuple[Arg, ...]] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})" if self.args else self.name

    def get(self, key: str) -> int | float | str | None:
        """The value of the argument `key`, or None."""
        return next((arg.value for arg in self.args if arg.key == key), None)

    @property
    def levels(self) -> tuple[tuple[str, Algorithm], ...]:
        """The name and the algorithm of each level of `hierarchical(..)`, innermost first.

        A level for which the plan names no algorithm has `native`. Other algorithms have no levels.
        """
        if self.name != "hierarchical":
            return ()
        return tuple(
            (arg.key, Algorithm(str(arg.value))) if arg.key else (str(arg.value), Algorithm("native"))
            for arg in self.args
        )


class Cache(msgspec.Struct, frozen=True, gc=False):
    """A cache of the results of a host function across epochs, one on each host.

    Attributes:
        nbytes: The maximum bytes.
        path: The path of the file that holds it; None if it is in memory.
    """

    nbytes: Execution[int]
    path: Execution[str | None] = None

    def __str__(self) -> str:
        return sized(self.nbytes) if self.path is None else f'disk("{self.path}", {sized(self.nbytes)})'


class Hints(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The options of one stage, as in its braces. None means that the plan does not set an option.

    Attributes:
        bucket: The maximum bytes of the buffer of a collective. A larger leaf is not divided.
        overlap: The computation that the stage overlaps with: `backward`, or `update` if the compiler chose
            so.
        wire: The type of floats when they are sent; by default, their own.
        codec: The block format of floats when they are sent, if `wire` is one.
        accumulate: The type of floats when they are added; by default their own, except in means of 16-bit
            floats (`for_mean`).
        chunk: The bytes of a message; of an exchange, also the maximum bytes of a unit of the state.
        staleness: The number of updates or requests that workers may lag behind (`protocol.sites.Site`).
        on_error: Whether a failing record is an error (`stop`, the default) or is left out (`skip`).
        on_failure: Whether the other processes stop if one that shares input dies.
        cores: The number of threads of a load or host function; by default one for each CPU, at most 8.
        prefetch: The number of batches that a load makes ahead, or of layers that a gather runs ahead.
        device_prefetch: The number of batches of a load whose copies to the device are started early.
        integers: The result of a mean for leaves that are no floats: their maximum, or the value of the first
            rank. By default such leaves are errors.
        cache: The cache of a host function; by default it has none.
    """

    bucket: Execution[int | None] = None
    overlap: Execution[Literal["backward", "update"] | None] = None
    wire: Meaning[DType | None] = None
    codec: Meaning[Codec | None] = None
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

        Only floats change type. The wire type defaults to `dtype`, and so does the accumulation type, which
        is at least as wide as the wire type. For a block format the wire
        type is `dtype`, and the accumulation type defaults to f32 or wider.

        Args:
            dtype: The type of the values.
            adds: Whether the values are added. Those that are only moved are never sent in a wider type.

        Returns:
            The wire type and the accumulation type.
        """
        if not dtype.is_float:
            return dtype, dtype
        wire = self.wire or dtype
        if not adds and wire.nbytes > dtype.nbytes:
            wire = dtype
        is_narrow = self.codec is not None and dtype.nbytes < DType.F32.nbytes
        accumulate = self.accumulate or (DType.F32 if is_narrow else dtype)
        return wire, accumulate if accumulate.nbytes >= wire.nbytes else wire

    def changes(self, dtype: DType) -> bool:
        """Whether sums of values of `dtype` are sent or added in another type."""
        return self.wire_types(dtype) != (dtype, dtype) or (self.codec is not None and dtype.is_float)

    @property
    def exact(self) -> Hints:
        """These hints without options that round values."""
        return msgspec.structs.replace(self, wire=None, codec=None, accumulate=None)

    def for_mean(self, dtypes: Collection[DType], via: Algorithm | None, *, is_weighted: bool) -> Hints:
        """The hints of a mean of leaves of `dtypes`.

        Without `accumulate`, f16 values are added in a wider type, because their sum may not fit in f16; and
        bf16 values too if the mean is weighted. The wider type is f32, or f64 if there are leaves of f64. An
        algorithm named by `via` adds in the type of its operand. With it, an unweighted mean keeps its hints
        and divides the values first (`divides_first`), and a weighted one adds wider terms.

        Args:
            dtypes: The types of the leaves.
            via: The algorithm in the plan; None if the compiler chooses.
            is_weighted: Whether the mean has weights.
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
        """Whether a mean divides its terms instead of their sum, because they are added in f16.

        Such a sum may overflow, although the mean does not.
        """
        return self.wire_types(dtype)[1] is DType.F16


def weight_type(weight: DType, dtypes: Collection[DType]) -> DType:
    """The type of the weights of a mean when they are added: f64 for 64-bit weights or f64 leaves, else f32.

    Args:
        weight: The type of the weights.
        dtypes: The types of the leaves that are averaged.
    """
    return DType.F64 if weight in (DType.F64, DType.I64) or DType.F64 in dtypes else DType.F32


# The hints of a stage without options.
NO_HINTS = Hints()


class Reduction(msgspec.Struct, frozen=True):
    """The operator of a reduction.

    Attributes:
        name: The operator.
        weight: The weight of each rank in a mean, a numeric scalar; None if there are no weights.
    """

    READS: ClassVar[tuple[str, ...]] = ("weight",)

    name: Meaning[Operator]
    weight: Meaning[Ref | None] = None

    def text(self) -> str:
        """The source text of the operator."""
        return f"{self.name}(weight = {name_of(self.weight)})" if self.weight else self.name
