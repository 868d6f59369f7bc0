"""Arrays of a batch: aligned memory, and the positions of copies and records in it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes: JAX on CPU aliases arrays with this alignment; also a cache line

Array = npt.NDArray[Any]
Fresh = Callable[[Sequence[int], np.dtype[Any]], Array]  # allocates an uninitialized array, as `aligned`
Bools = npt.NDArray[np.bool_]


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An uninitialized array whose address is a multiple of 64 bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start: Any = raw
    address = ctypes.addressof(ctypes.c_char.from_buffer(start))  # `raw.ctypes.data` takes far longer
    return np.ndarray(shape, dtype, raw, -address % ALIGNMENT)


def blocks(
    leading: Sequence[int], inner: Sequence[int], dtype: np.dtype[Any], fresh: Fresh = aligned
) -> Array:
    """An uninitialized array [*leading, *inner] in which each block [*inner] is aligned to 64 bytes.

    Blocks are contiguous, but the array is not if their size is not a multiple of 64 bytes.

    Args:
        leading: the number of blocks along each leading dimension.
        inner: the shape of a block.
        dtype: the dtype.
        fresh: allocates memory.
    """
    nbytes = math.prod(inner) * dtype.itemsize
    count = math.prod(leading)
    stride = rounded(nbytes)
    if count <= 1 or stride == nbytes:
        return fresh((*leading, *inner), dtype)
    memory = fresh((count * stride,), np.dtype(np.uint8))
    strides: list[int] = []
    for sizes, unit in ((inner, dtype.itemsize), (leading, stride)):
        strides = [*(unit * math.prod(sizes[index + 1 :]) for index in range(len(sizes))), *strides]
    return np.ndarray((*leading, *inner), dtype, memory, 0, strides)


def read_only(array: Array) -> Array:
    """A read-only view of `array`."""
    view = array.view()
    view.setflags(write=False)
    return view


def rounded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def agrees(axes: Sequence[str], coords: Sequence[int], fixed: Mapping[str, int]) -> bool:
    """Whether `coords` along `axes` equal `fixed` on every axis that both contain."""
    return all(
        fixed.get(axis, coordinate) == coordinate for axis, coordinate in zip(axes, coords, strict=True)
    )


def compacted(counted: Bools, usable: Bools, shards: int) -> npt.NDArray[np.int64]:
    """The source row of each slot, so that counted rows come first in every shard.

    Args:
        counted: [rows], whether each row counts. Shards are equal runs of rows.
        usable: [rows], whether each row has a valid record. Usable rows that do not count are padding.
        shards: the number of shards, which divides the number of rows.

    Returns:
        [rows], row numbers. The remaining slots of a shard repeat its counted rows, or its usable rows if no
        row counts; -1 if it has neither.
    """
    source_rows = np.full(len(counted), -1, np.int64)
    shard_rows = len(counted) // shards
    for start in range(0, shard_rows * shards, shard_rows or 1):  # no iteration for an empty batch
        local = slice(start, start + shard_rows)
        rows = start + np.flatnonzero(counted[local] & usable[local])
        if not rows.size:
            rows = start + np.flatnonzero(usable[local])
        if rows.size:
            source_rows[local] = np.resize(rows, shard_rows)  # repeats `rows`
    return source_rows


def fill_rows(target: Array, column: Sequence[Any]) -> None:
    """Copy records into an array.

    Args:
        target: [rows, ...], the array.
        column: an array of the same shape, which is not copied if it shares memory with `target`; or a
            sequence of records, with None for a skipped record, whose row becomes zero.
    """
    if isinstance(column, np.ndarray):
        if not np.may_share_memory(target, column):
            target[...] = column
        return
    for row, value in enumerate(column):
        target[row] = 0 if value is None else value
