"""What `run.tap` makes of the way in which a phase reduces an input: which ops run on what of a gradient."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.grouping import grouped
from commplan.ir.types import DType

Step = ir.Cast | ir.Collective | ir.LocalSum | ir.Scale
D = TypeVar("D", bound=Hashable)

TAP = "tap"  # in the names of what a tap reduces, before those of the phase and plan line
COPY_NBYTES = 1 << 20
"""Arrays below this are packed on GPUs: to read and write 1 MiB twice takes one 2 us, about as long as NCCL
takes for one array more."""


class Chains(NamedTuple):
    """flat: by dtype, what happens to a buffer of it; empty where nothing is packed. tree: what happens after
    that to the tree. whole: whether every buffer becomes one value that is the same on all ranks."""

    flat: Mapping[DType, tuple[Step, ...]]
    tree: tuple[Step, ...]
    whole: bool


def chains(ref: str, uses: DefUse[ir.Op], values: Mapping[str, ir.Value]) -> Chains:
    """How the input `ref` of a phase is reduced. values: those of the phase."""
    tree, end = _follow(ref, uses)
    flat: dict[DType, tuple[Step, ...]] = {}
    whole, after = True, tree
    for pack in (op for op in uses.readers(end) if isinstance(op, ir.Pack)):
        chain, buffer = _follow(pack.result, uses)
        flat.setdefault(values[pack.result].leaves[0].dtype, (*tree, *chain))
        unpack = next((op for op in uses.readers(buffer) if isinstance(op, ir.Unpack)), None)
        whole = whole and unpack is not None and pack.ways == 1
        after = _follow(unpack.result, uses)[0] if unpack else ()
    return Chains(flat, after, whole)


def _follow(ref: str, uses: DefUse[ir.Op]) -> tuple[tuple[Step, ...], str]:
    """The ops that turn `ref` into one value after another, as far as they go."""
    chain: list[Step] = []
    while True:
        own = [op for op in uses.readers(ref) if isinstance(op, Step) and op.operand == ref]
        if len(own) != 1:
            return tuple(chain), ref
        chain.append(own[0])
        ref = own[0].result


def joined(leaves: Sequence[tuple[D, int]], asynchronous: bool) -> list[tuple[D, list[int]]]:
    """What is reduced together of `leaves`, dtype and bytes of each: its dtype, and the places of its leaves.

    asynchronous: whether that runs beside what is still computed. Then large leaves are alone.
    """
    result: list[tuple[D, list[int]]] = []
    for dtype, places in grouped(range(len(leaves)), lambda place: leaves[place][0]).items():
        small = [place for place in places if not asynchronous or leaves[place][1] < COPY_NBYTES]
        result += [(dtype, [place]) for place in places if place not in small]
        result += [(dtype, small)] if small else []
    return result
