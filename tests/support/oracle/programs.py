"""Chunk programs executed in NumPy for all ranks at once: what every other way of running them must give.

Element types are held as `numbers` holds them; sums are made in the declared type, one transfer after the
other, so that floats have the rounding of the algorithm's own order of additions, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from commplan.collectives.layout import bounds
from commplan.collectives.program import ChunkProgram, Family, Ints
from commplan.ir.types import DType

from .numbers import Array, combine

ReduceOp = Literal["sum", "max", "min"]


def execute(
    program: ChunkProgram, buffers: Sequence[Array], op: ReduceOp = "sum", dtype: DType | None = None
) -> list[Array]:
    """The buffers of every rank after `program`, from those before; one-dimensional, in rank order.

    all_reduce, reduce, broadcast: [S] in and out. reduce_scatter and scatter: [n*k] in, this rank's [k] out.
    all_gather and gather: [k] in, [n*k] out. swap: [n*k] in and out. S need not be divisible by anything. The
    buffers of ranks outside the postcondition (all but the root after `reduce` and `gather`) are undefined.

    `dtype`: the element type, if it differs from that of the arrays (bfloat16 held as float32).
    """
    kind = dtype or DType(str(DType.from_name(buffers[0].dtype.name)))
    n = program.ranks
    state = _enter(program, buffers)
    edges = bounds(program.kind, n, program.chunks, state.shape[1])
    for sends in program.rounds:
        before = state.copy()
        for send in sends:
            _transfer(send, edges, before, state, op, kind)
    if program.kind == "swap":
        return [_blocks(row, slots) for row, slots in zip(state, program.arrivals, strict=True)]
    if program.kind not in ("reduce_scatter", "scatter"):
        return list(state)
    width = state.shape[1] // n
    return [state[rank, rank * width : (rank + 1) * width] for rank in range(n)]


def _enter(program: ChunkProgram, buffers: Sequence[Array]) -> Array:
    """The slots of all ranks, one row each: blocks at their position if blocks are gathered, and in the order
    of their slots if they are swapped."""
    if program.kind == "swap":
        return np.stack([_blocks(x, order) for x, order in zip(buffers, program.targets, strict=True)])
    if program.kind not in ("all_gather", "gather"):
        return np.stack(buffers)
    width = len(buffers[0])
    state = np.zeros((program.ranks, program.ranks * width), buffers[0].dtype)
    for rank, block in enumerate(buffers):
        state[rank, rank * width : (rank + 1) * width] = block
    return state


def _blocks(x: Array, order: Ints) -> Array:
    """The equal blocks of `x` in another order."""
    return x.reshape(len(order), -1)[order].reshape(-1)


def _transfer(send: Family, edges: Ints, before: Array, state: Array, op: ReduceOp, dtype: DType) -> None:
    """The transfers of one send, all at once: no slot is written twice in a round."""
    first, last = edges[send.chunk], edges[send.chunk + send.count]
    elements = _runs(first, last - first)
    sources, targets = (np.repeat(ranks, last - first) for ranks in (send.src, send.dst))
    new = before[sources, elements]
    state[targets, elements] = combine(op, state[targets, elements], new, dtype) if send.reduce else new


def _runs(first: Ints, length: Ints) -> Ints:
    """The numbers from each `first` on, `length` of them, one run after the other."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - ends + length, length)
