"""The default bucket size for stages without an explicit choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.ir.schedule import Backend, Collective
from commplan.ir.types import sized
from commplan.passes.bin_packing import LeafSlice, halved

DEFAULT_NBYTES = 25 * 1024**2
# Under JAX if costs are unknown: best overlap in steps compiled for H100 (`bench.compiled`).
JAX_PARTS, JAX_MAX_NBYTES = 8, 64 * 1024**2
FAIR = 4  # the smaller of two parts is at least 1/4 of the whole, otherwise there is one part


class Size(NamedTuple):
    """A bucket limit in bytes and its reason."""

    limit: int
    why: str


def size(backend: Backend, head: Collective, nbytes: int, items: Sequence[LeafSlice]) -> Size:
    """Return the limit for a stage.

    Args:
        backend: `jax` or `mpi`.
        head: the stage's first collective.
        nbytes: bytes of the stage's operands.
        items: its leaves.
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
