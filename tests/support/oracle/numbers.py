"""Element types in NumPy, bfloat16 included where `ml_dtypes` is not installed.

Without `ml_dtypes` a bfloat16 array is held as float32 whose every value is a bfloat16: `convert`
rounds after each operation, to nearest, ties to even, as the hardware does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from commplan.ir.types import DType

Array = npt.NDArray[Any]


@cache
def storage(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds `dtype`: its own, or float32 for bfloat16 without `ml_dtypes`."""
    if dtype is not DType.BF16:
        return np.dtype(dtype.numpy_name)
    try:
        import ml_dtypes  # noqa: PLC0415 - it comes with jax and is no dependency of the core
    except ImportError:
        return np.dtype(np.float32)
    return np.dtype(ml_dtypes.bfloat16)


def round_bfloat16(array: Array) -> Array:
    """The float32 values of `array`, each rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)
    # Adding to the bits of a NaN could make it an infinity, so NaNs keep theirs.
    return np.where(np.isnan(array), array, rounded).astype(np.float32).reshape(np.shape(array))


def convert(array: npt.ArrayLike, dtype: DType) -> Array:
    """`array` as `dtype`, rounded if that is narrower; values out of range become infinite."""
    with np.errstate(all="ignore"):
        stored = np.asarray(array).astype(storage(dtype))
    if dtype is DType.BF16 and stored.dtype == np.float32:
        return round_bfloat16(stored)
    return stored


def combine(op: Literal["sum", "max", "min"], first: Array, second: Array, dtype: DType) -> Array:
    """`first` and `second` combined element by element, the result rounded to `dtype`.

    Integers wrap around; a NaN in either operand gives NaN; -0 is less than 0.
    """
    function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    with np.errstate(all="ignore"):
        combined = function(first, second)
        if op != "sum" and dtype.is_float:
            # Of two zeros NumPy gives either. Their sum is -0 only if both are, as is their maximum.
            zeros = first + second if op == "max" else -(-first - second)
            combined = np.where((first == 0) & (second == 0), zeros, combined)
        return convert(combined, dtype)


def multiply(array: Array, factor: npt.ArrayLike, dtype: DType) -> Array:
    """`array * factor`, the factor first converted to `dtype`, or of a 16-bit float to f32."""
    with np.errstate(all="ignore"):
        return convert(np.multiply(convert(array, wide(dtype)), convert(factor, wide(dtype))), dtype)


def divide(array: Array, divisor: npt.ArrayLike, dtype: DType) -> Array:
    """`array / divisor`, the divisor first converted to `dtype`, or of a 16-bit float to f32. Integers are
    divided by one only."""
    by = convert(divisor, wide(dtype))
    if not dtype.is_float:
        return array if bool(by == 1) else convert(np.floor_divide(array, by), dtype)
    with np.errstate(all="ignore"):
        return convert(np.divide(convert(array, wide(dtype)), by), dtype)


def weighted(array: Array, part: npt.ArrayLike, whole: npt.ArrayLike, dtype: DType) -> Array:
    """`array * part / whole`, with the quotient in the type of the scalars.

    The product is zero for a zero weight, even for NaN and infinity; integers are unchanged.
    """
    if not dtype.is_float:
        return array
    if not np.asarray(part) or not np.asarray(whole):
        return np.zeros_like(array)
    with np.errstate(all="ignore"):
        share = convert(np.divide(part, whole), wide(dtype))
        return convert(np.multiply(convert(array, wide(dtype)), share), dtype)


def holds(dtype: DType, number: Any) -> bool:
    """Whether `number` is a plain one that `dtype` has exactly."""
    if not isinstance(number, int | float):
        return False
    with np.errstate(over="ignore"):
        return float(np.asarray(number).astype(dtype.numpy_name)) == number


def wide(dtype: DType) -> DType:
    """The type for multiplying values of `dtype`: f32 for 16-bit floats, otherwise `dtype`."""
    return DType.F32 if dtype in (DType.F16, DType.BF16) else dtype
