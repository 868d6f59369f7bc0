"""Where the chunks of a program lie in a buffer of any size."""

from __future__ import annotations

import numpy as np

from commplan.collectives.program import BLOCKED, Ints, Kind
from commplan.diagnostics import fail


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
