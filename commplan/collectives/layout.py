"""Where the chunks of a program lie in a buffer of any size."""

from __future__ import annotations

import numpy as np

from commplan.collectives.program import BLOCKED, Ints, Kind
from commplan.diagnostics import fail

# Bytes of one message over MPI at most: Open MPI sends up to 64 KiB over TCP, headers included, without
# asking its receiver first.
MESSAGE = 64 * 1024 - 256
PARTS = 8192  # of a buffer, at most, whatever size is written for them


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
    if kind not in BLOCKED:
        return np.arange(chunks + 1, dtype=np.int64) * size // chunks
    if size % ranks or chunks % ranks:
        fail(
            "CP0738",
            f"{kind} over {ranks} ranks cannot cut {size} elements into {chunks} chunks",
            f"every rank has a block of its own: both numbers must be multiples of {ranks}",
        )
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
