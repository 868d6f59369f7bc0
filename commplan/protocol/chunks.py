"""Flat buffers in chunks, and chunks dealt out to owners by bytes, as in PHub (arXiv 1805.07891)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

# The minimum bytes of a chunk, unless the plan has a size.
LEAST = 4 * 1024
# The maximum bytes of a chunk, unless the plan has a size.
MOST = 256 * 1024
# The desired number of chunks of each owner, so that they stream and balance.
FOR_EACH = 8


def usual(nbytes: int, owners: int) -> int:
    """The default chunk size in bytes: several chunks for each owner, neither tiny nor huge."""
    return min(MOST, max(LEAST, -(-nbytes // (owners * FOR_EACH))))


def cut(size: int, most: int) -> tuple[tuple[int, int], ...]:
    """The fewest runs (start, length), none longer than `most` elements, that cover `size` elements.

    Their lengths differ by at most one element. There are none if `size` is 0.
    """
    count = -(-size // max(1, most))
    edges = [*(size * part // count for part in range(count)), size]
    return tuple((start, stop - start) for start, stop in itertools.pairwise(edges))


def assign(nbytes: Sequence[int], owners: int) -> tuple[int, ...]:
    """The owner of each chunk, in order: the owner with the fewest bytes so far, the first of several.

    No owner gets more than the mean plus the largest chunk. The result depends on the arguments alone, so
    that all processes compute the same one.

    Args:
        nbytes: The bytes of each chunk.
        owners: The number of owners, at least 1.

    Returns:
        The index of the owner of each chunk, 0 to `owners` - 1.
    """
    loads = [(0, owner) for owner in range(owners)]
    chosen: list[int] = []
    for size in nbytes:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + size, owner))
        chosen.append(owner)
    return tuple(chosen)
