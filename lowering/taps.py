"""Derives the reduction that `run.tap` applies to gradients from the way in which a phase reduces an input.

The lowering to JAX runs these reductions inside the backward pass, and the audit expects their collectives in
a compiled step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.collective_kinds import TAKES_BLOCKS
from commplan.ir.grouping import grouped
from commplan.ir.types import DType

Step = ir.Cast | ir.Collective | ir.LocalSum | ir.Scale | ir.Encode | ir.Decode
D = TypeVar("D", bound=Hashable)  # a dtype, of any library

TAP = "tap"  # prefix in the names of tapped reductions, before the phase and the plan line
COPY_NBYTES = 1 << 20
"""Arrays of fewer bytes share a buffer if collectives are asynchronous. A GPU reads and writes 1 MiB twice in
2 us, which is about as long as NCCL needs for one more array."""


class Chains(NamedTuple):
    """The steps of the reduction of one input.

    Attributes:
        flat: The steps up to the end of the buffer, by the buffer's dtype. They run on one flat array of the
            leaves of that dtype. Empty if the phase packs nothing.
        tree: The subsequent steps on the tree, or all steps if the phase packs nothing.
        is_unsharded: Whether every buffer is unpacked and has one row, so that it is not sharded. True if the
            phase packs nothing.
    """

    flat: Mapping[DType, tuple[Step, ...]]
    tree: tuple[Step, ...]
    is_unsharded: bool


def chains(ref: str, uses: DefUse[ir.Op], values: Mapping[str, ir.Value]) -> Chains:
    """The reduction of one input of a phase.

    Args:
        ref: The input.
        uses: The uses of values by the ops of the phase.
        values: The values of the phase, by name.
    """
    tree, end = _follow(ref, uses)
    flat: dict[DType, tuple[Step, ...]] = {}
    is_unsharded, after = True, tree
    for pack in (op for op in uses.readers(end) if isinstance(op, ir.Pack)):
        chain, buffer = _follow(pack.result, uses)
        flat.setdefault(values[pack.result].leaves[0].dtype, (*tree, *chain))
        unpack = next((op for op in uses.readers(buffer) if isinstance(op, ir.Unpack)), None)
        is_unsharded = is_unsharded and unpack is not None and pack.ways == 1
        after = _follow(unpack.result, uses)[0] if unpack else ()
    return Chains(flat, after, is_unsharded)


def _follow(ref: str, uses: DefUse[ir.Op]) -> tuple[tuple[Step, ...], str]:
    """The sequence of steps that starts at `ref`, and its last result.

    It ends at the first value that is the operand of no step, or of several.
    """
    chain: list[Step] = []
    while True:
        readers = [op for op in uses.readers(ref) if isinstance(op, Step) and op.operand == ref]
        if len(readers) != 1:
            return tuple(chain), ref
        chain.append(readers[0])
        ref = readers[0].result


def scattered_axes(chain: Sequence[Step]) -> tuple[str, ...]:
    """The axes over which `chain` divides its array, whose size must be a multiple of their ranks.

    Scatters are nested: each divides the shard of the one before.
    """
    scatters = (op for op in chain if isinstance(op, ir.Collective) and op.kind in TAKES_BLOCKS)
    return tuple(dict.fromkeys(axis for op in scatters for axis in op.axes))


def reduction_groups(leaves: Sequence[tuple[D, int]], asynchronous: bool) -> list[tuple[D, list[int]]]:
    """The groups of leaves that are reduced in one buffer.

    Args:
        leaves: Dtype and bytes of each leaf.
        asynchronous: Whether collectives overlap with computation. If so, each leaf of `COPY_NBYTES` bytes or
            more is a group of its own.

    Returns:
        The dtype of each group and the indices of its leaves, in ascending order.
    """
    result: list[tuple[D, list[int]]] = []
    for dtype, indices in grouped(range(len(leaves)), lambda index: leaves[index][0]).items():
        small = [index for index in indices if not asynchronous or leaves[index][1] < COPY_NBYTES]
        result += [(dtype, [index]) for index in indices if index not in small]
        result += [(dtype, small)] if small else []
    return result
