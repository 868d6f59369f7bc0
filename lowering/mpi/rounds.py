"""Form `rounds`: a blocking call of mpi4jax for each message of a round, its own collectives for `native`.

Nothing has to be compiled for it, and what every call does can be read in the program. It waits for each
message before the next, so it is slower; its results are those of the engine, bit by bit, but for subnormal
sums: XLA takes them for zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commplan.collectives.layout import bounds
from commplan.collectives.program import ChunkProgram
from commplan.lowering.jax.collectives.bitcast import from_bits, to_bits
from commplan.lowering.jax.collectives.programs import blocks, slots
from commplan.lowering.jax.typing_shim import jnp
from commplan.lowering.mpi.tuning import Spec
from commplan.lowering.mpi.typing_shim import MPI, mpi4jax
from commplan.lowering.permutes import WindowTransfer, message_groups

Array = Any


def tied(x: Array, token: Array) -> Array:
    """`x`, but not before `token` exists. mpi4jax orders its own calls only, and XLA:CPU drops barriers."""
    return jnp.where(token[0] == -1, jnp.zeros_like(x), x)  # tokens are never negative


def after(token: Array, y: Array) -> Array:
    """`token`, but not before `y` exists."""
    first = y.reshape(-1)[0]
    return jnp.where(token == -1, first.astype(token.dtype), token)


def run(program: ChunkProgram, x: Array, rank: int, op: str, comm: Any) -> Array:
    """What `rank` holds after `program`; one-dimensional, as in `lowering.jax.collectives.programs.run`.

    comm: the communicator of the program's ranks, for mpi4jax alone.
    """
    if x.dtype == jnp.bool_:
        return run(program, x.astype(jnp.uint8), rank, "min" if op == "min" else "max", comm) != 0
    block, x = x.shape[0], slots(program, x, rank)
    edges = bounds(program.kind, program.ranks, program.chunks, x.shape[0])
    for sends in program.rounds:
        before = x
        for group in message_groups(sends, edges):
            x = _exchange(x, before, group, rank, op, comm)
    if program.kind == "swap":
        return blocks(x, program.arrivals, rank)
    if program.kind in ("reduce_scatter", "scatter"):
        own = block // program.ranks
        return x[rank * own : (rank + 1) * own]
    return x


def _exchange(
    x: Array, before: Array, group: dict[tuple[int, int], list[WindowTransfer]], rank: int, op: str, comm: Any
) -> Array:
    """At most one message from this rank and one to it."""
    given = next(((pair[1], own) for pair, own in group.items() if pair[0] == rank), None)
    taken = next(((pair[0], own) for pair, own in group.items() if pair[1] == rank), None)
    message = to_bits(_windows(before, given[1])) if given else None
    if taken is None:
        if given:
            mpi4jax.send(message, given[0], comm=comm)
        return x
    template = to_bits(jnp.zeros_like(x, shape=(sum(each.length for each in taken[1]),)))
    if given:
        arrived = mpi4jax.sendrecv(message, template, taken[0], given[0], comm=comm)
    else:
        arrived = mpi4jax.recv(template, taken[0], comm=comm)
    arrived = from_bits(arrived, x.dtype)
    at = 0
    for each in taken[1]:
        part = arrived[at : at + each.length]
        at += each.length
        if each.adds:
            part = _combined(x[each.low : each.high], part, op)
        x = x.at[each.low : each.high].set(part)
    return x


def _windows(x: Array, parts: Sequence[WindowTransfer]) -> Array:
    windows = [x[each.low : each.high] for each in parts]
    return windows[0] if len(windows) == 1 else jnp.concatenate(windows)


def _combined(held: Array, arrived: Array, op: str) -> Array:
    how = {"max": jnp.maximum, "min": jnp.minimum}.get(op, jnp.add)
    return how(held, arrived)


def native(x: Array, spec: Spec, rank: int, comm: Any) -> Array:
    """mpi4jax's own collective of `x`; flat. Of `reduce` and `gather` every rank gets the result.

    What it cannot reduce (16-bit floats), or would reduce otherwise than we promise (the maximum of a number
    and a NaN; Open MPI's sums of bytes saturate), is gathered and reduced here, in the order of the ranks.
    """
    flat, ranks = x.reshape(-1), comm.Get_size()
    match spec.kind:
        case "all_reduce" | "reduce":
            if x.dtype.itemsize >= 4 and (spec.op == "sum" or not jnp.issubdtype(x.dtype, jnp.floating)):
                how = {"max": MPI.MAX, "min": MPI.MIN}.get(spec.op, MPI.SUM)
                return mpi4jax.allreduce(flat, op=how, comm=comm)
            return _fold(_carried(mpi4jax.allgather, flat, comm=comm), spec.op)
        case "reduce_scatter":
            rows = _carried(mpi4jax.alltoall, flat.reshape(ranks, -1), comm=comm)
            return _fold(rows, spec.op)
        case "all_gather" | "gather":
            return _carried(mpi4jax.allgather, flat, comm=comm).reshape(-1)
        case "all_to_all" | "swap":
            return _carried(mpi4jax.alltoall, flat.reshape(ranks, -1), comm=comm).reshape(-1)
        case "broadcast":
            return _carried(mpi4jax.bcast, flat, root=spec.root, comm=comm)
        case "scatter":
            whole = _carried(mpi4jax.bcast, flat, root=spec.root, comm=comm)
            own = whole.shape[0] // ranks
            return whole[rank * own : (rank + 1) * own]
        case "shift":
            raise AssertionError("a shift is a program of its own")


def _carried(move: Any, x: Array, **how: Any) -> Array:
    return from_bits(move(to_bits(x), **how), x.dtype)


def _fold(rows: Array, op: str) -> Array:
    if rows.dtype == jnp.bool_:
        return _fold(rows.astype(jnp.uint8), "min" if op == "min" else "max") != 0
    total = rows[0]
    for row in rows[1:]:
        total = _combined(total, row, op)
    return total
