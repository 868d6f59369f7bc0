"""Rows of bytes that carry their own number, and checksums of them by the host and by the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]
NUMBER = 4  # bytes of a row that hold its number, little endian
_FACTOR = 2654435761  # Knuth's multiplicative hash: an odd factor for each place of a row


class NumberedRows:
    """Records u8[size]: record i is row i of a seeded pattern of 64, again and again, but for its number."""

    def __init__(self, count: int, size: int) -> None:
        self._pattern = np.random.default_rng(0).integers(0, 256, (64, size), np.uint8)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Rows:
        row = self._pattern[number % len(self._pattern)].copy()
        row[:NUMBER] = np.frombuffer(np.uint32(number).tobytes(), np.uint8)
        return row

    def sums(self) -> dict[int, int]:
        """The checksum of every record by its number."""
        pattern = self._pattern.copy()
        pattern[:, :NUMBER] = 0
        without = np.resize(_sums(pattern), self._count)
        numbers = np.arange(self._count, dtype=np.uint32).view(np.uint8).reshape(-1, NUMBER)
        sums: list[int] = (without + _sums(numbers)).tolist()
        return dict(enumerate(sums))


def numbered(rows: Rows) -> Rows:
    """`rows` u8[n, size], changed in place: each begins with its number."""
    rows[:, :NUMBER] = np.arange(len(rows), dtype=np.uint32).view(np.uint8).reshape(-1, NUMBER)
    return rows


def host_sums(rows: Rows) -> dict[int, int]:
    """The checksum of each of `rows`, which are numbered, by its number."""
    numbers = np.ascontiguousarray(rows[:, :NUMBER]).view(np.uint32)[:, 0].tolist()
    sums = [int(_sums(rows[i : i + 1])[0]) for i in range(len(rows))]
    return dict(zip(numbers, sums, strict=True))


def _sums(rows: Rows) -> npt.NDArray[np.uint32]:
    factors = np.arange(rows.shape[1], dtype=np.uint32) * np.uint32(_FACTOR) | np.uint32(1)
    return (rows * factors).sum(1, dtype=np.uint32)


@jax.jit
def device_sums(rows: Any) -> tuple[Any, Any]:
    """Numbers and checksums, u32[n], of numbered rows u8[n, size] on the device.

    A checksum depends on every byte and on its place, modulo 2**32.
    """
    wide = rows.astype(jnp.uint32)
    factors = jnp.arange(rows.shape[1], dtype=jnp.uint32) * jnp.uint32(_FACTOR) | jnp.uint32(1)
    places = jnp.uint32(8) * jnp.arange(NUMBER, dtype=jnp.uint32)
    return (wide[:, :NUMBER] << places).sum(1, dtype=jnp.uint32), (wide * factors).sum(1, dtype=jnp.uint32)


def wrong_rows(expected: Mapping[int, int], batches: Sequence[tuple[Any, Any]]) -> int:
    """How many rows of `batches`, results of `device_sums`, have another checksum than their number's.

    A row whose number is unknown is wrong.
    """
    pairs = (
        pair
        for numbers, sums in batches
        for pair in zip(np.asarray(numbers).tolist(), np.asarray(sums).tolist(), strict=True)
    )
    return sum(expected.get(number) != checksum for number, checksum in pairs)
