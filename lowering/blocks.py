"""Block formats (`ir.codec`) on arrays of NumPy or JAX, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from commplan.ir.codec import SMALLEST, Codec
from commplan.ir.types import DType

_INFINITY, _NAN16 = 0x7F800000, 0x7FC0  # bits of f32, and of a bf16
_LIMITS = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38}


class Library(NamedTuple):
    """The functions of an array library.

    Attributes:
        module: `numpy` or `jax.numpy`.
        bits: A function of an array and a type: the bits of the array as elements of this type. If the sizes
            of the types differ, the shape of the result depends on the library.
        float8: The type of 8-bit floats (e4m3fn).
    """

    module: Any
    bits: Callable[[Any, Any], Any]
    float8: Any


def encode(x: Any, codec: Codec, rows: int, library: Library) -> Any:
    """Encode the rows of a flat array.

    Args:
        x: Floats [rows * k].
        codec: The block format.
        rows: The number of rows, each encoded separately.
        library: The functions of the array library.

    Returns:
        The bytes, u8 [rows * codec.nbytes(k)].
    """
    xp, bits = library.module, library.bits
    width, count = x.shape[0] // rows, codec.blocks(x.shape[0] // rows)
    blocks = _in_blocks(x.reshape(rows, width).astype(xp.float32), codec, xp)
    largest = xp.max(bits(blocks, xp.uint32) & 0x7FFFFFFF, axis=-1, initial=0)
    is_finite = largest < _INFINITY
    is_scaled = is_finite & (largest >= int(np.float32(SMALLEST).view(np.uint32)))
    quotient = bits(largest, xp.float32) * xp.float32(1 / codec.largest)
    rounded_up = (bits(quotient, xp.uint32) + 0xFFFF) >> 16
    scales = xp.where(is_scaled, rounded_up, xp.where(is_finite, 0, _NAN16)).astype(xp.uint16)
    divisor = bits(xp.where(is_scaled, rounded_up << 16, 0x3F800000).astype(xp.uint32), xp.float32)
    numbers = xp.where(is_scaled[..., None], blocks / divisor[..., None], xp.float32(0))
    numbers = numbers.reshape(rows, count * codec.block)
    if codec.name == "f8e4m3":
        payload = bits(numbers.astype(library.float8), xp.uint8)
    else:
        payload = bits(xp.rint(numbers).astype(xp.int8), xp.uint8)
    if codec.name == "int4":
        payload = (payload[:, ::2] & 15) | (payload[:, 1::2] << 4)
    parts = [payload[:, : codec.payload(width)], bits(scales, xp.uint8).reshape(rows, 2 * count)]
    return xp.concatenate(parts, axis=1).reshape(-1)


def decode(code: Any, codec: Codec, rows: int, width: int, dtype: DType, library: Library) -> Any:
    """Decode the rows of a flat array.

    Args:
        code: The bytes, u8 [rows * codec.nbytes(width)].
        codec: The block format.
        rows: The number of rows.
        width: The number of elements of a row.
        dtype: The type that the caller converts the result to. Finite elements beyond its range are limited.
        library: The functions of the array library.

    Returns:
        The elements, f32 [rows * width].
    """
    xp, bits = library.module, library.bits
    code, count = code.reshape(rows, codec.nbytes(width)), codec.blocks(width)
    payload, scales = code[:, : codec.payload(width)], code[:, codec.payload(width) :]
    scales = bits(scales.reshape(rows, count, 2), xp.uint16).reshape(rows, count).astype(xp.uint32)
    if codec.name == "f8e4m3":
        numbers = bits(payload, library.float8)
    elif codec.name == "int8":
        numbers = bits(payload, xp.int8)
    else:
        halves = xp.stack([payload & 15, payload >> 4], axis=-1).reshape(rows, -1)[:, :width]
        numbers = bits((halves ^ 8) - 8, xp.int8)
    blocks = _in_blocks(numbers.astype(xp.float32), codec, xp)
    values = blocks * bits(scales << 16, xp.float32)[..., None]
    limit = xp.float32(_LIMITS.get(dtype, np.finfo(np.float32).max))
    return xp.clip(values, -limit, limit).reshape(rows, count * codec.block)[:, :width].reshape(-1)


def _in_blocks(rows: Any, codec: Codec, xp: Any) -> Any:
    """Rows as blocks: [rows, blocks, codec.block], with zeros after the last element."""
    count = codec.blocks(rows.shape[1])
    padded = xp.pad(rows, [(0, 0), (0, count * codec.block - rows.shape[1])])
    return padded.reshape(len(rows), count, codec.block)
