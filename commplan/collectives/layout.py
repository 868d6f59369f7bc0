"""Sizes of chunks: their offsets in a buffer, the size of messages, and the number of slices.

The lowerings and the cost model share these functions, so that they agree on offsets and messages.
"""

from __future__ import annotations

import math

import numpy as np

from commplan.collectives.program import IN_BLOCKS, Ints, Kind
from commplan.diagnostics import fail

# The maximum bytes of one message over MPI, also of the input pipeline. Open MPI sends up to 64 KiB over TCP
# without a handshake; 256 bytes are left for its headers.
MESSAGE = 64 * 1024 - 256
# Chunks are halved, to overlap two messages, only if the halves have more than this number of bytes.
HALVED = 12 * 1024
# Bytes of the largest element.
LONGEST = 8
# The maximum number of parts of a buffer, for any requested size of a part (`slices`).
PARTS = 8192


def message(of_chunk: float, requested: int | None) -> int:
    """The maximum bytes of an MPI message.

    By default, chunks that are not short are sent in at least two messages, so that one half is added and
    sent on while the other arrives. Chunks of one buffer differ by one element, which must not cause a third
    message.

    Args:
        of_chunk: The mean bytes of a chunk.
        requested: The message size in the plan, in bytes; None for the default.

    Returns:
        A number of bytes, at most `MESSAGE`.

    >>> message(25_600, None), message(16_384, None), message(1e6, None), message(25_600, 16_384)
    (12808, 65280, 65280, 16384)
    """
    half = math.ceil(of_chunk / 2) + LONGEST
    return min(requested or (half if half > HALVED else MESSAGE), MESSAGE)


def bounds(kind: Kind, ranks: int, chunks: int, size: int) -> Ints:
    """Offsets [chunks + 1], in elements, of the chunks in a buffer of `size` elements.

    If all ranks have the same buffer (all_reduce, broadcast, reduce), chunk i is `i*size//chunks` to
    `(i+1)*size//chunks`. If every rank has a block, `size` is `ranks` times the block, and each block is
    divided in the same way into `chunks / ranks` parts. Chunks differ by at most one element, and some are
    empty if there are fewer elements than chunks.

    Raises:
        CommplanError: CP0738 if every rank has a block, and `size` or `chunks` is no multiple of `ranks`.

    >>> bounds("all_reduce", 3, 3, 10).tolist()
    [0, 3, 6, 10]
    >>> bounds("all_gather", 2, 4, 6).tolist()
    [0, 1, 3, 4, 6]
    """
    if kind not in IN_BLOCKS:
        return np.arange(chunks + 1, dtype=np.int64) * size // chunks
    if size % ranks or chunks % ranks:
        problem = f"{kind} over {ranks} ranks cannot cut {size} elements into {chunks} chunks"
        note = f"every rank has one block: both numbers must be multiples of {ranks}"
        fail("CP0738", problem, note)
    parts, block = chunks // ranks, size // ranks
    chunk = np.arange(chunks + 1, dtype=np.int64)
    return chunk // parts * block + chunk % parts * block // parts


def slices(chunks: int, nbytes: int, size: int | None) -> int:
    """The number of slices per chunk, at least 1.

    A buffer is cut into at most about `PARTS` parts, because a program with more parts would take longer to
    verify than to run.

    Args:
        chunks: The number of chunks in the buffer.
        nbytes: The bytes of the whole buffer.
        size: The requested bytes of a slice, at least 1; None keeps chunks whole.

    >>> slices(4, 1024, 100), slices(4, 1024, None), slices(1, 1 << 20, 1)
    (3, 1, 8192)
    """
    if size is None:
        return 1
    return max(1, -(-nbytes // (chunks * max(size, -(-nbytes // PARTS)))))
