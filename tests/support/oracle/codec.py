"""Block formats in NumPy, block by block and number by number, written without reading the backends."""

from __future__ import annotations

import math
import struct
from functools import cache

import numpy as np

from commplan.ir.codec import Codec
from commplan.ir.types import DType

from .numbers import Array, convert

Floats = list[float]


@cache
def numbers(name: str) -> tuple[Floats, list[int]]:
    """The numbers of a format in ascending order, and the byte (or half byte) of each."""
    if name == "int8":
        pairs = [(float(value), value & 255) for value in range(-127, 128)]
    elif name == "int4":
        pairs = [(float(value), value & 15) for value in range(-7, 8)]
    else:
        pairs = [(_float8(byte), byte) for byte in range(256) if byte & 127 != 127]
    pairs.sort(key=lambda pair: (pair[0], math.copysign(1, pair[0])))
    return [value for value, _ in pairs], [byte for _, byte in pairs]


def _float8(byte: int) -> float:
    """A float of 1 sign, 4 exponent and 3 fraction bits, with bias 7; both patterns of NaN are excluded."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return math.copysign(size, -1 if byte >> 7 else 1)


def to_bytes(row: Array, codec: Codec) -> Array:
    """The bytes of one row: its numbers, then the scale of each block in bf16."""
    values, codes = numbers(codec.name)
    row = convert(row, DType.F32)
    payload: list[int] = []
    scales = b""
    for start in range(0, len(row), codec.block):
        block = row[start : start + codec.block]
        bits = _scale_bits(block, codec)
        scales += struct.pack("<H", bits)
        scale = np.array([bits << 16], np.uint32).view(np.float32)[0]
        for element in block:
            with np.errstate(all="ignore"):
                number = element / scale if 0 < scale < np.inf else np.float32(0)
            payload.append(codes[_nearest(float(number), values, codes)])
    if codec.name == "int4":
        payload += [0] * (len(payload) % 2)
        payload = [low | high << 4 for low, high in zip(payload[::2], payload[1::2], strict=True)]
    return np.array([*payload, *scales], np.uint8)


def _scale_bits(block: Array, codec: Codec) -> int:
    """The bits of the scale: the largest magnitude over the largest number, rounded up to a bf16."""
    if not np.isfinite(block).all():
        return 0x7FC0
    largest = np.abs(block).max()
    if largest < 2.0**-100:
        return 0
    top = {"int8": 127, "int4": 7, "f8e4m3": 448}[codec.name]
    quotient = largest * np.float32(1 / top)
    bits = int(quotient.view(np.uint32))
    return (bits >> 16) + (bits & 0xFFFF != 0)


def _nearest(number: float, values: Floats, codes: list[int]) -> int:
    """The index of the value closestest to `number`; between two, that whose code is even. -0.0 is kept."""
    distance = [abs(value - number) for value in values]
    best = min(distance)
    closest = [index for index, each in enumerate(distance) if each == best]
    sign = math.copysign(1, number)
    return min(closest, key=lambda index: (codes[index] & 1, math.copysign(1, values[index]) != sign))


def from_bytes(row: Array, codec: Codec, width: int, dtype: DType) -> Array:
    """The elements of one row of bytes."""
    values, codes = numbers(codec.name)
    value_of = dict(zip(codes, values, strict=True))
    split = (width + 1) // 2 if codec.name == "int4" else width
    payload = [int(byte) for byte in row[:split]]
    if codec.name == "int4":
        payload = [half for byte in payload for half in (byte & 15, byte >> 4)][:width]
    scales = (row[split:].view("<u2").astype(np.uint32) << 16).view(np.float32)
    received = np.array(
        [np.float32(value_of[byte]) * scales[at // codec.block] for at, byte in enumerate(payload)],
        np.float32,
    )
    limit = {DType.F16: 65504.0, DType.BF16: 255 * 2.0**120}.get(dtype, float(np.finfo(np.float32).max))
    return convert(np.clip(received, np.float32(-limit), np.float32(limit)), dtype)
