"""Derives the steps of `run.tap` from the way in which a phase reduces an input."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.grouping import grouped
from commplan.ir.types import DType

Step = ir.Cast | ir.Collective | ir.LocalSum | ir.Scale
D = TypeVar("D", bound=Hashable)

TAP = "tap"  # prefix in the names of tapped reductions, before the phase and the plan line
COPY_NBYTES = 1 << 20
"""Smaller arrays are packed on GPUs. Reading and writing 1 MiB twice takes 2 us, about as long as NCCL needs
for one more array."""


class Chains(NamedTuple):
    """The steps of a reduction.

    Attributes:
        flat: By dtype, the steps on a buffer; empty if nothing is packed.
        tree: The subsequent steps on the tree.
        whole: Whether every buffer becomes one value that is the same on all ranks.
    """

    flat: Mapping[DType, tuple[Step, ...]]
    tree: tuple[Step, ...]
    whole: bool


def chains(ref: str, uses: DefUse[ir.Op], values: Mapping[str, ir.Value]) -> Chains:
    """The reduction of the input `ref` of a phase; `values` are those of the phase."""
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
    """The ops that transform `ref` in sequence, while each value has exactly one, and the last result."""
    chain: list[Step] = []
    while True:
        readers = [op for op in uses.readers(ref) if isinstance(op, Step) and op.operand == ref]
        if len(readers) != 1:
            return tuple(chain), ref
        chain.append(readers[0])
        ref = readers[0].result


def reduction_groups(leaves: Sequence[tuple[D, int]], asynchronous: bool) -> list[tuple[D, list[int]]]:
    """The groups of leaves that are reduced in one buffer, as dtype and indices.

    Args:
        leaves: Dtype and bytes of each leaf.
        asynchronous: Whether collectives overlap with computation. Then large leaves are reduced separately.
    """
    result: list[tuple[D, list[int]]] = []
    for dtype, indices in grouped(range(len(leaves)), lambda index: leaves[index][0]).items():
        small = [index for index in indices if not asynchronous or leaves[index][1] < COPY_NBYTES]
        result += [(dtype, [index]) for index in indices if index not in small]
        result += [(dtype, small)] if small else []
    return result
