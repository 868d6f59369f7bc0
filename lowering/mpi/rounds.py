"""Form `rounds`: one blocking mpi4jax call per message; mpi4jax's collectives for `native`.

It needs no C++ compiler, and each call is visible in the jaxpr. It is slower than the engine, because each
message waits for the one before. Results are bitwise those of the engine, except for subnormal sums, which
XLA flushes to zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax import Array
from mpi4py import MPI

from commplan.collectives.layout import bounds
from commplan.collectives.program import ChunkProgram
from commplan.ir.collective_kinds import SCATTERING
from commplan.lowering.jax.collectives.bitcast import from_bits, to_bits
from commplan.lowering.jax.collectives.programs import blocks, slots
from commplan.lowering.mpi.tuning import Spec
from commplan.lowering.permutes import WindowTransfer, message_groups

with warnings.catch_warnings():
    # mpi4jax warns about every JAX release newer than itself. Supported versions of JAX are tested with it.
    warnings.filterwarnings("ignore", message=r"\s*The latest supported JAX version", category=UserWarning)
    import mpi4jax as _mpi4jax  # pyright: ignore[reportMissingTypeStubs]

mpi4jax: Any = cast("Any", _mpi4jax)  # it has no stubs


def tied(x: Array, token: Array) -> Array:
    """`x`, ordered after `token`, i32[1]. mpi4jax orders only its own calls; XLA:CPU removes barriers."""
    return jnp.where(token[0] == -1, jnp.zeros_like(x), x)  # tokens are never negative


def after(token: Array, y: Array) -> Array:
    """`token`, an i32[1], ordered after `y`, which has at least one element."""
    first = y.reshape(-1)[0]
    return jnp.where(token == -1, first.astype(token.dtype), token)


def run(program: ChunkProgram, x: Array, rank: int, op: str, comm: Any) -> Array:
    """Run a chunk program message by message; see `lowering.jax.collectives.programs.run`.

    Args:
        program: The chunk program.
        x: This rank's operand, one-dimensional.
        rank: This rank's index among the program's ranks.
        op: The reduction: sum, max or min.
        comm: The communicator of the program's ranks, used only by mpi4jax.

    Returns:
        This rank's result, one-dimensional.
    """
    if x.dtype == jnp.bool_:
        return run(program, x.astype(jnp.uint8), rank, "min" if op == "min" else "max", comm) != 0
    operand_size, x = x.shape[0], slots(program, x, rank)
    edges = bounds(program.kind, program.ranks, program.chunks, x.shape[0])
    for sends in program.rounds:
        before = x
        for group in message_groups(sends, edges):
            x = _exchange(x, before, group, rank, op, comm)
    if program.kind == "swap":
        return blocks(x, program.arrivals, rank)
    if program.kind in SCATTERING:
        length = operand_size // program.ranks
        return x[rank * length : (rank + 1) * length]
    return x


def _exchange(
    x: Array, before: Array, group: dict[tuple[int, int], list[WindowTransfer]], rank: int, op: str, comm: Any
) -> Array:
    """Exchange the messages of one group, at most one in each direction.

    Args:
        x: The buffer, to which earlier groups of the round have written.
        before: The buffer before the round, from which data is sent.
        group: The transfers of each message by (source, destination).
        rank: This rank.
        op: The reduction.
        comm: The communicator.

    Returns:
        The buffer with the received data.
    """
    outgoing = next(((pair[1], parts) for pair, parts in group.items() if pair[0] == rank), None)
    incoming = next(((pair[0], parts) for pair, parts in group.items() if pair[1] == rank), None)
    message = to_bits(_windows(before, outgoing[1])) if outgoing else None
    if incoming is None:
        if outgoing:
            mpi4jax.send(message, outgoing[0], comm=comm)
        return x
    template = to_bits(jnp.zeros_like(x, shape=(sum(part.length for part in incoming[1]),)))
    if outgoing:
        arrived = mpi4jax.sendrecv(message, template, incoming[0], outgoing[0], comm=comm)
    else:
        arrived = mpi4jax.recv(template, incoming[0], comm=comm)
    arrived = from_bits(arrived, x.dtype)
    offset = 0
    for transfer in incoming[1]:
        window = arrived[offset : offset + transfer.length]
        offset += transfer.length
        if transfer.adds:
            window = _combine(x[transfer.low : transfer.high], window, op)
        x = x.at[transfer.low : transfer.high].set(window)
    return x


def _windows(x: Array, parts: Sequence[WindowTransfer]) -> Array:
    windows = [x[part.low : part.high] for part in parts]
    return windows[0] if len(windows) == 1 else jnp.concatenate(windows)


def _combine(local: Array, arrived: Array, op: str) -> Array:
    combine = {"max": jnp.maximum, "min": jnp.minimum}.get(op, jnp.add)
    return combine(local, arrived)


def native(x: Array, spec: Spec, rank: int, comm: Any) -> Array:
    """mpi4jax's collective of the flattened `x`. For `reduce` and `gather` every rank gets the result.

    mpi4jax cannot reduce 16-bit floats. Its maximum of a number and a NaN is unspecified, and Open MPI's sums
    of bytes saturate. Such operands, and those of a reduce-scatter, are exchanged and reduced here, in rank
    order.

    Args:
        x: This rank's operand.
        spec: The collective; not a `shift`, which always has a program.
        rank: This rank's index in `comm`.
        comm: The communicator of the ranks, used only by mpi4jax.

    Returns:
        The result, one-dimensional except for `reduce_scatter`.
    """
    flat = x.reshape(-1)
    ranks = comm.Get_size()
    match spec.kind:
        case "all_reduce" | "reduce":
            if x.dtype.itemsize >= 4 and (spec.op == "sum" or not jnp.issubdtype(x.dtype, jnp.floating)):
                mpi_op = {"max": MPI.MAX, "min": MPI.MIN}.get(spec.op, MPI.SUM)
                return mpi4jax.allreduce(flat, op=mpi_op, comm=comm)
            return _fold(_move_bits(mpi4jax.allgather, flat, comm=comm), spec.op)
        case "reduce_scatter":
            rows = _move_bits(mpi4jax.alltoall, flat.reshape(ranks, -1), comm=comm)
            return _fold(rows, spec.op)
        case "all_gather" | "gather":
            return _move_bits(mpi4jax.allgather, flat, comm=comm).reshape(-1)
        case "all_to_all" | "swap":
            return _move_bits(mpi4jax.alltoall, flat.reshape(ranks, -1), comm=comm).reshape(-1)
        case "broadcast":
            return _move_bits(mpi4jax.bcast, flat, root=spec.root, comm=comm)
        case "scatter":
            whole = _move_bits(mpi4jax.bcast, flat, root=spec.root, comm=comm)
            length = whole.shape[0] // ranks
            return whole[rank * length : (rank + 1) * length]
        case "shift":
            raise AssertionError("a shift has a program and no native form")


def _move_bits(move: Any, x: Array, **options: Any) -> Array:
    """`move(x)` on integers with the same bits, for dtypes that mpi4jax lacks."""
    return from_bits(move(to_bits(x), **options), x.dtype)


def _fold(rows: Array, op: str) -> Array:
    """The reduction of `rows` along the leading dimension, in order."""
    if rows.dtype == jnp.bool_:
        return _fold(rows.astype(jnp.uint8), "min" if op == "min" else "max") != 0
    total = rows[0]
    for row in rows[1:]:
        total = _combine(total, row, op)
    return total
