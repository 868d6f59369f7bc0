"""Flat buffers in chunks, and chunks dealt out to owners by bytes, as in PHub (arXiv 1805.07891)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

LEAST = 4 * 1024  # bytes of a chunk unless the plan has a size
MOST = 256 * 1024
FOR_EACH = 8  # chunks for every owner, so that they stream and balance


def usual(nbytes: int, owners: int) -> int:
    """The default chunk size in bytes: several chunks for each owner, neither tiny nor huge."""
    return min(MOST, max(LEAST, -(-nbytes // (owners * FOR_EACH))))


def cut(size: int, most: int) -> tuple[tuple[int, int], ...]:
    """The fewest runs (start, length) of nearly equal lengths, at most `most`, that cover `size` elements."""
    count = -(-size // max(1, most))
    edges = [*(size * part // count for part in range(count)), size]
    return tuple((start, stop - start) for start, stop in itertools.pairwise(edges))


def assign(nbytes: Sequence[int], owners: int) -> tuple[int, ...]:
    """The owner of each chunk: always the one with the fewest bytes so far, the first of several.

    No owner gets more than the mean and one chunk. The same numbers give the same answer everywhere.
    """
    loads = [(0, owner) for owner in range(owners)]
    chosen: list[int] = []
    for size in nbytes:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + size, owner))
        chosen.append(owner)
    return tuple(chosen)
