"""The ranks of a communicator as a backend: one device per rank, collectives over MPI.

A rank's place is known when a program is bound, so indices are plain numbers, and JAX types nothing: what is
the same and what differs was proved when the plan was compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from commplan.ir.schedule import Collective, Schedule
from commplan.lowering.jax.untyped import jnp, lax
from commplan.lowering.mpi.untyped import MPI, mpi4jax

Array = Any
_BITS: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


@dataclasses.dataclass(frozen=True, eq=False)
class MpiBackend:
    """One rank of a communicator: see `lowering.jax.backend.Backend`.

    sizes: the plan's axes, in its order; ranks lie on their grid row-major. place: this rank's index along
    each. groups: the communicators of the ranks that differ along some axes alone, in their row-major order.
    """

    sizes: Mapping[str, int]
    place: Mapping[str, int]
    groups: Mapping[tuple[str, ...], Any]
    file: str = ""
    typed: bool = False

    def ways(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: str | tuple[str, ...]) -> int:
        return position(self.place, self.sizes, (axes,) if isinstance(axes, str) else axes)

    def varying(self, x: Array, axes: tuple[str, ...]) -> Array:
        del axes
        return x

    def same(self, x: Array, axes: tuple[str, ...]) -> Array:
        del axes
        return x

    def tie(self, x: Array, previous: Array, axes: tuple[str, ...]) -> Array:
        """All operations are ordered, one after another, whatever their operands."""
        del previous, axes
        return x

    def all_reduce(self, x: Array, op: Collective) -> Array:
        if self.ways(op.axes) == 1:
            return x
        if x.dtype == jnp.bool_:
            how = MPI.MIN if op.op == "min" else MPI.MAX
            return mpi4jax.allreduce(x.astype(jnp.uint8), op=how, comm=self._group(op)) != 0
        if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
            return self._fold(self._all(x, op), op)
        return mpi4jax.allreduce(x, op=_OPS[op.op or "sum"], comm=self._group(op))

    def reduce_scatter(self, x: Array, op: Collective) -> Array:
        ways = self.ways(op.axes)
        if ways == 1:
            return x
        rows = self.all_to_all(x, op).reshape(ways, x.shape[0] // ways, *x.shape[1:])
        return self._fold(rows, op)

    def all_gather(self, x: Array, op: Collective) -> Array:
        if self.ways(op.axes) == 1:
            return x
        return self._all(x, op).reshape(-1, *x.shape[1:])

    def all_to_all(self, x: Array, op: Collective) -> Array:
        ways = self.ways(op.axes)
        if ways == 1:
            return x
        bits = _to_bits(x).reshape(ways, -1)
        moved = mpi4jax.alltoall(bits, comm=self._group(op))
        return _from_bits(moved.reshape(x.shape), x)

    def broadcast(self, x: Array, op: Collective) -> Array:
        if self.ways(op.axes) == 1:
            return x
        return _from_bits(mpi4jax.bcast(_to_bits(x), op.root or 0, comm=self._group(op)), x)

    def start(self, x: Array, op: Collective) -> Callable[[], Array] | None:
        del x, op
        return None

    def _group(self, op: Collective) -> Any:
        return self.groups[op.axes]

    def _all(self, x: Array, op: Collective) -> Array:
        """[ranks, ...]: what every rank has."""
        return _from_bits(mpi4jax.allgather(_to_bits(x), comm=self._group(op)), x)

    @staticmethod
    def _fold(rows: Array, op: Collective) -> Array:
        how = {"max": jnp.maximum, "min": jnp.minimum}.get(op.op or "sum", jnp.add)
        total = rows[0]
        for row in rows[1:]:
            total = how(total, row)
        return total


def position(place: Mapping[str, int], sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """Where a rank stands among the ranks along `axes`, counted row-major, first named major."""
    at = 0
    for axis in axes:
        at = at * sizes[axis] + place[axis]
    return at


def place_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The indices of `rank` on the grid of axes of `sizes`, the last axis innermost."""
    found: dict[str, int] = {}
    for axis in reversed(list(sizes)):
        rank, found[axis] = divmod(rank, sizes[axis])
    return {axis: found[axis] for axis in sizes}


def backend_of(schedule: Schedule, comm: Any) -> MpiBackend:
    """The backend of this rank. Every rank of `comm` calls it alike: it makes communicators.

    `comm` itself is never used for messages: a program has communicators of its own.
    """
    sizes = schedule.mesh_sizes
    place = place_of(comm.Get_rank(), sizes)
    axes = [op.axes for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)]
    groups: dict[tuple[str, ...], Any] = {}
    for own in dict.fromkeys(axes):
        rest = tuple(axis for axis in sizes if axis not in own)
        groups[own] = comm.Split(position(place, sizes, rest), position(place, sizes, own))
    return MpiBackend(sizes, place, groups, schedule.file)


def _to_bits(x: Array) -> Array:
    """What MPI has no name for as integers of the same width."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if x.dtype.itemsize != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def _from_bits(moved: Array, original: Array) -> Array:
    if moved.dtype == original.dtype:
        return moved
    if original.dtype == jnp.bool_:
        return moved.astype(jnp.bool_)
    return lax.bitcast_convert_type(moved, original.dtype)
