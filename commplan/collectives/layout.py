"""Offsets of the chunks of a program in a buffer of any size."""

from __future__ import annotations

import math

import numpy as np

from commplan.collectives.program import IN_BLOCKS, Ints, Kind
from commplan.diagnostics import fail

# The maximum bytes of one message over MPI: Open MPI sends up to 64 KiB over TCP, including headers, without
# a handshake.
MESSAGE = 64 * 1024 - 256
HALVED = 12 * 1024  # the minimum bytes of a message, if chunks are halved only to overlap two messages
LONGEST = 8  # bytes of the largest element
PARTS = 8192  # the maximum number of parts of a buffer, for any requested size


def message(of_chunk: float, requested: int | None) -> int:
    """The maximum bytes of an MPI message, for chunks of `of_chunk` bytes.

    `requested` is the message size in the plan, if any. By default, chunks that are not short are sent in at
    least two messages, so that one half is added and sent on while the other arrives. Chunks of one buffer
    differ by one element, which must not cause a third message.

    >>> message(25_600, None), message(16_384, None), message(1e6, None), message(25_600, 16_384)
    (12808, 65280, 65280, 16384)
    """
    half = math.ceil(of_chunk / 2) + LONGEST
    return min(requested or (half if half > HALVED else MESSAGE), MESSAGE)


def bounds(kind: Kind, ranks: int, chunks: int, size: int) -> Ints:
    """Offsets [chunks + 1], in elements, of the chunks in a buffer of `size` elements.

    If all ranks share one buffer (all_reduce, broadcast, reduce), chunk i is `i*size//chunks` to
    `(i+1)*size//chunks`. If every rank has a block, `size` is `ranks` times the block, and each block is
    divided in the same way into `chunks / ranks` parts. Chunks differ by at most one element, and some are
    empty if there are fewer elements than chunks. Raises CP0738 if the blocks would not be equal.

    >>> bounds("all_reduce", 3, 3, 10).tolist()
    [0, 3, 6, 10]
    >>> bounds("all_gather", 2, 4, 6).tolist()
    [0, 1, 3, 4, 6]
    """
    if kind not in IN_BLOCKS:
        return np.arange(chunks + 1, dtype=np.int64) * size // chunks
    if size % ranks or chunks % ranks:
        message = f"{kind} over {ranks} ranks cannot cut {size} elements into {chunks} chunks"
        note = f"every rank has one block: both numbers must be multiples of {ranks}"
        fail("CP0738", message, note)
    parts, block = chunks // ranks, size // ranks
    chunk = np.arange(chunks + 1, dtype=np.int64)
    return chunk // parts * block + chunk % parts * block // parts


def slices(chunks: int, nbytes: int, size: int | None) -> int:
    """The number of slices per chunk, so that about `size` bytes are sent at once.

    A buffer is cut into at most about `PARTS` parts, because a program with more parts would take longer to
    verify than to run.

    Args:
        chunks: The number of chunks.
        nbytes: The bytes of the whole buffer.
        size: The requested bytes; None keeps chunks whole.

    >>> slices(4, 1024, 100), slices(4, 1024, None), slices(1, 1 << 20, 1)
    (3, 1, 8192)
    """
    if size is None:
        return 1
    return max(1, -(-nbytes // (chunks * max(size, -(-nbytes // PARTS)))))
