"""The default bucket size, for stages for which neither the plan, nor an option, nor the search chose one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.ir.schedule import Backend, Collective
from commplan.ir.types import sized
from commplan.passes.bin_packing import LeafSlice, halved

DEFAULT_NBYTES = 25 * 1024**2  # bytes
# Reductions under JAX: an eighth of the stage, between the default and 64 MiB. Steps compiled for H100
# overlap best with these sizes (`bench.compiled`).
JAX_PARTS = 8  # number of buckets
JAX_MAX_NBYTES = 64 * 1024**2  # bytes
FAIR = 4  # a stage is cut in two parts only if the smaller one is at least 1/4 of the whole


class Size(NamedTuple):
    """A bucket limit and its reason.

    Attributes:
        limit: Maximum bytes of one rank's buffer.
        why: The reason, in words.
    """

    limit: int
    why: str


def size(backend: Backend, head: Collective, nbytes: int, items: Sequence[LeafSlice]) -> Size:
    """Return the limit for a group of collectives that share buckets.

    Args:
        backend: The backend.
        head: The first collective of the group.
        nbytes: Bytes of one rank's operands, over the group.
        items: The leaves of the group. With `overlap = update`, the limit divides them nearly in half.
    """
    if head.hints.overlap == "update":
        larger, _ = halved(items)
        return Size(larger, "cut nearly in half: one part is updated while another is in flight")
    limit = DEFAULT_NBYTES
    if backend == "jax" and head.op is not None:
        limit = min(max(DEFAULT_NBYTES, nbytes // JAX_PARTS), JAX_MAX_NBYTES)
    return Size(limit, f"the default limit is {sized(limit)}")


def in_halves(items: Sequence[LeafSlice]) -> bool:
    """Whether the leaves can be divided into two parts of nearly equal size."""
    larger, smaller = halved(items)
    return smaller * FAIR >= larger + smaller
