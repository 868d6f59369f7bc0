"""Where the chunks of a program lie in a buffer of any size."""

from __future__ import annotations

import math

import numpy as np

from commplan.collectives.program import IN_BLOCKS, Ints, Kind
from commplan.diagnostics import fail

# Bytes of one message over MPI at most: Open MPI sends up to 64 KiB over TCP, headers included, without
# asking its receiver first.
MESSAGE = 64 * 1024 - 256
HALVED = 12 * 1024  # bytes of a message at least, where chunks are halved only so that two are under way
LONGEST = 8  # bytes of an element
PARTS = 8192  # of a buffer, at most, whatever size is written for them


def message(of_chunk: float, asked: int | None) -> int:
    """Bytes of a message over MPI at most, for chunks of `of_chunk` bytes where `asked` bytes are asked for.

    Where nothing is asked for, chunks that are not short travel in halves at least: one half is added and
    sent on while the other arrives. Chunks of one buffer differ by one element; none has a third part for it.

    >>> message(25_600, None), message(16_384, None), message(1e6, None), message(25_600, 16_384)
    (12808, 65280, 65280, 16384)
    """
    half = math.ceil(of_chunk / 2) + LONGEST
    return min(asked or (half if half > HALVED else MESSAGE), MESSAGE)


def bounds(kind: Kind, ranks: int, chunks: int, size: int) -> Ints:
    """Offsets [chunks + 1], in elements, of the chunks in a buffer of `size` elements.

    Where all ranks share one buffer (all_reduce, broadcast, reduce) chunk i is `i*size//chunks` to
    `(i+1)*size//chunks`. Where every rank has a block, `size` is `ranks` times the block, and each block is
    cut in that way into `chunks / ranks` parts. Chunks differ by one element at most, and where there are
    fewer elements than chunks some are empty. Raises CP0738 where the blocks would not be equal.

    >>> bounds("all_reduce", 3, 3, 10).tolist()
    [0, 3, 6, 10]
    >>> bounds("all_gather", 2, 4, 6).tolist()
    [0, 1, 3, 4, 6]
    """
    if kind not in IN_BLOCKS:
        return np.arange(chunks + 1, dtype=np.int64) * size // chunks
    if size % ranks or chunks % ranks:
        message = f"{kind} over {ranks} ranks cannot cut {size} elements into {chunks} chunks"
        note = f"every rank has a block of its own: both numbers must be multiples of {ranks}"
        fail("CP0738", message, note)
    parts, block = chunks // ranks, size // ranks
    chunk = np.arange(chunks + 1, dtype=np.int64)
    return chunk // parts * block + chunk % parts * block // parts


def slices(chunks: int, nbytes: int, size: int | None) -> int:
    """Into how many slices each of `chunks` chunks is cut, so that what moves at once has `size` bytes.

    nbytes: of the whole buffer. None: chunks stay whole. A buffer is cut into no more than about `PARTS`
    parts, so that a small size does not make a program that takes longer to prove than to run.

    >>> slices(4, 1024, 100), slices(4, 1024, None), slices(1, 1 << 20, 1)
    (3, 1, 8192)
    """
    if size is None:
        return 1
    return max(1, -(-nbytes // (chunks * max(size, -(-nbytes // PARTS)))))
