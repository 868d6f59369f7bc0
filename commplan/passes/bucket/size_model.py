"""How large buckets should be, from predicted times.

Let S bytes travel in n buckets of b bytes, each taking T(b). Where the collectives run under the computation
that makes their operands, what is left exposed is at least the last bucket, and otherwise what does not fit
under that computation. How long it takes is not known when a plan is compiled; the size matters most where it
is as long as the communication, T(S), and the first bucket is ready after 1/n of it:

    exposed(b) = max(T(b), n T(b) - (1 - 1/n) T(S))

With T(b) = alpha + beta b that is n alpha + beta S / n, least at n = sqrt(beta S / alpha). Where nothing can
be hidden, exposed(b) = n T(b), which falls with b until latency does not show any more: then buckets are as
large as the default, or larger where that saves a hundredth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commplan.ir.remark import Alternative
from commplan.ir.schedule import Backend, Collective
from commplan.ir.types import sized
from commplan.passes.bucket.bin_packing import LeafSlice, halved
from commplan.select.algorithm_search import Chooser, rounded

DEFAULT = 25 * 1024**2
# Under JAX where costs are not known: what hides most in steps compiled for H100 (`bench.compiled`).
PARTS, LARGEST = 8, 64 * 1024**2
LEAST = 64 * 1024
STEP = 4  # sizes that are tried differ by this factor
FAIR = 4  # the smaller of two parts is at least this part of the whole; else there is one
NEAR_MARGIN = 0.01  # what leaves no more than this longer exposed is as good


class Size(NamedTuple):
    """Bytes of a bucket at most, why, and the predicted exposed seconds of it and of other sizes."""

    limit: int
    why: str
    seconds: float | None = None
    source: str = ""
    alternatives: tuple[Alternative, ...] = ()


def size(chooser: Chooser, head: Collective, nbytes: int, items: Sequence[LeafSlice]) -> Size:
    """The limit for a stage whose operands have `nbytes`, of which `head` is the first collective."""
    if head.hints.overlap == "update":
        larger, _ = halved(items)
        return Size(larger, "cut nearly in half: one part is updated while another is under way")
    hidden = is_overlappable(head, chooser.schedule.backend)
    if chooser.costs is None and hidden and chooser.jax:
        limit = min(max(DEFAULT, nbytes // PARTS), LARGEST)
        return Size(limit, f"the default limit is {sized(limit)}")
    if chooser.costs is None or (not hidden and nbytes <= DEFAULT) or nbytes <= LEAST:
        return Size(DEFAULT, f"the default limit is {sized(DEFAULT)}")
    sizes = candidate_sizes(nbytes, hidden=hidden)
    ways = {each: chooser.about(replace(head, nbytes=each)) for each in sizes}
    whole = ways[nbytes]
    if whole is None:
        return Size(DEFAULT, f"the default limit is {sized(DEFAULT)}")
    exposed = {
        each: _exposed(-(-nbytes // each), way.seconds, whole.seconds, hidden=hidden)
        for each, way in ways.items()
        if way is not None
    }
    least = min(exposed.values())
    # The fewest buckets; of what cannot be hidden the smallest, which need the least memory.
    order = sizes if hidden else sizes[::-1]
    limit = next(each for each in order if exposed.get(each, math.inf) <= least * (1 + NEAR_MARGIN))
    others = sorted((seconds, each) for each, seconds in exposed.items() if each != limit)
    alternatives = tuple(
        Alternative(f"up to {sized(each)}", rounded(seconds)) for seconds, each in others[:4]
    )
    why = f"up to {sized(limit)} in one "
    why += "leaves the least time behind the backward pass" if hidden else "takes the least time"
    return Size(limit, why, rounded(exposed[limit]), whole.source, alternatives)


def in_halves(items: Sequence[LeafSlice]) -> bool:
    """Whether leaves can be cut in two parts that are halves or nearly so."""
    larger, smaller = halved(items)
    return smaller * FAIR >= larger + smaller


def is_overlappable(op: Collective, backend: Backend) -> bool:
    """Whether `op` may run under computation: reductions, in JAX always, under MPI where asked for."""
    return op.op is not None and (backend == "jax" or op.hints.overlap is not None)


def candidate_sizes(nbytes: int, *, hidden: bool) -> Sequence[int]:
    """Sizes of buckets, largest first: all in one, a quarter of it, and so on."""
    least = LEAST if hidden else DEFAULT
    sizes = [nbytes]
    while sizes[-1] // STEP >= least:
        sizes.append(-(-sizes[-1] // STEP))
    return sizes


def _exposed(count: int, each: float, whole: float, *, hidden: bool) -> float:
    if not hidden:
        return count * each
    return max(each, count * each - (1 - 1 / count) * whole)
