"""What a phase asks of the machine that it runs on: places, types and collectives.

`lowering.jax.collectives.lax_backend` answers for the devices of a mesh, inside a shard_map;
`lowering.mpi.backend` for the ranks of a communicator, where a program runs on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from commplan.ir.schedule import Collective
from commplan.lowering.jax.servers import ServerAccess

Array = Any  # a jax.Array or a tracer of one


class Run(NamedTuple):
    """Elements of a buffer, `size` of them from `offset` on: those of array `array` from its `start` on."""

    offset: int
    array: int
    start: int
    size: int


@dataclass(frozen=True)
class BufferLayout:
    """How arrays of `shapes` lie in a buffer of `size` elements: `runs`, in the order of their offsets.

    What no run covers is zero in what a collective takes, and dropped of what it gives.
    """

    size: int
    runs: tuple[Run, ...]
    shapes: tuple[tuple[int, ...], ...]


class Backend(Protocol):
    """One rank's view of the machine, while a phase is traced."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The plan's axes with their numbers of ranks."""
        ...

    @property
    def file(self) -> str:
        """The plan's file, for messages."""
        ...

    @property
    def typed(self) -> bool:
        """Whether JAX types values by the axes over which they vary, as it does inside a shard_map."""
        ...

    @property
    def service(self) -> ServerAccess | None:
        """The plan's servers; None where there are none."""
        ...

    @property
    def variadic(self) -> bool:
        """Whether all-reduces take arrays as they are: nothing is gained by packing large ones."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether collectives run beside computation and each other, so that a large array is best sent by
        itself as soon as it is there."""
        ...

    def apart(self, key: str) -> contextlib.AbstractContextManager[Any]:
        """While collectives are made that the backend's compiler combines with none of another `key`."""
        ...

    def ways(self, axes: tuple[str, ...]) -> int:
        """The number of ranks along `axes`."""
        ...

    def index(self, axes: str | tuple[str, ...]) -> Array:
        """This rank's place along `axes`, counted row-major, first named major: a whole number or i32[]."""
        ...

    def varying(self, x: Array, axes: tuple[str, ...]) -> Array:
        """`x`, typed as varying over `axes` too. No communication."""
        ...

    def same(self, x: Array, axes: tuple[str, ...]) -> Array:
        """`x`, typed as the same over `axes`: only for what a proof says about it. No communication."""
        ...

    def tie(self, x: Array, previous: Array, axes: tuple[str, ...]) -> Array:
        """`x`, unchanged, but not before `previous` exists; `x` goes into a collective over `axes`."""
        ...

    def behind(
        self, xs: Sequence[Array], previous: Sequence[Array], axes: tuple[str, ...]
    ) -> tuple[list[Array], list[Array]]:
        """Both, unchanged: `xs`, which go into a collective over `axes`, not before `previous` exist; what is
        given for these is to be used in their place."""
        ...

    def move(self, x: Array, op: Collective) -> Array:
        """The collective `op` on one array that has the shape that it wants.

        all_reduce: sum, maximum or minimum over `op.axes`; the same shape and dtype. Booleans: or, or, and.
        reduce_scatter: a sum; each rank keeps its rows of the leading dimension, a multiple of the ranks.
        all_gather: the leading dimensions of all ranks one after another, first named axis major.
        all_to_all: row i of [n*k] goes to rank i; the rows that arrive stand in rank order.
        broadcast: `x` of rank `op.root`, counted row-major over `op.axes`, bit for bit.
        reduce: as all_reduce, on rank `op.root`; elsewhere anything.
        """
        ...

    def start_packed(
        self, xs: Sequence[Array], op: Collective, taken: BufferLayout, given: BufferLayout
    ) -> Callable[[], Sequence[Array]] | None:
        """The collective of a buffer in which arrays of one dtype lie as `taken` says, without making it;
        what comes is cut as `given` says. As `start`, or done already where `op` is carried out in one. None
        where the buffers must be made."""
        ...

    def start(self, x: Array, op: Collective) -> Callable[[], Array] | None:
        """Begin the collective, to be completed by calling what is returned; None where it is done in one.

        Between the two other work may run, other collectives that are begun included. All that were begun
        are completed before the phase ends.
        """
        ...
