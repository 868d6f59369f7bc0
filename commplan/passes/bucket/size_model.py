"""How large buckets are if nothing was chosen for the stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.ir.schedule import Backend, Collective
from commplan.ir.types import sized
from commplan.passes.bucket.bin_packing import LeafSlice, halved

DEFAULT = 25 * 1024**2
# Under JAX where costs are not known: what hides most in steps compiled for H100 (`bench.compiled`).
PARTS, LARGEST = 8, 64 * 1024**2
FAIR = 4  # the smaller of two parts is at least this part of the whole; else there is one


class Size(NamedTuple):
    """Bytes of a bucket at most, and why."""

    limit: int
    why: str


def size(backend: Backend, head: Collective, nbytes: int, items: Sequence[LeafSlice]) -> Size:
    """The limit for a stage whose operands have `nbytes`, of which `head` is the first collective."""
    if head.hints.overlap == "update":
        larger, _ = halved(items)
        return Size(larger, "cut nearly in half: one part is updated while another is under way")
    limit = DEFAULT
    if backend == "jax" and head.op is not None:
        limit = min(max(DEFAULT, nbytes // PARTS), LARGEST)
    return Size(limit, f"the default limit is {sized(limit)}")


def in_halves(items: Sequence[LeafSlice]) -> bool:
    """Whether leaves can be cut in two parts that are halves or nearly so."""
    larger, smaller = halved(items)
    return smaller * FAIR >= larger + smaller
