"""The interface between a lowered phase and a backend: indices, types and collectives.

`lowering.jax.collectives.lax_backend` implements it for the devices of a mesh, inside a shard_map;
`lowering.mpi.backend` for the ranks of a communicator, with one device each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jax import Array

from commplan.ir.schedule import Collective
from commplan.lowering.jax.servers import ServerAccess


class BufferRun(NamedTuple):
    """Consecutive elements of a buffer that come from, or go to, one array. Offsets are in elements.

    Attributes:
        offset: The first element in the buffer.
        array: The index of the array.
        start: The first element in the flattened array.
        size: The number of elements.
    """

    offset: int
    array: int
    start: int
    size: int


@dataclass(frozen=True)
class BufferLayout:
    """How a buffer is packed from arrays, or unpacked to arrays.

    Attributes:
        size: The number of elements of the buffer.
        runs: The parts of the buffer, in the order of their offsets. Elements in no run are zero in an
            operand, and dropped from a result.
        shapes: The shape of each array.
    """

    size: int
    runs: tuple[BufferRun, ...]
    shapes: tuple[tuple[int, ...], ...]


class Backend(Protocol):
    """A backend, from the view of one rank while a phase is traced."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The axes of the plan with their sizes."""
        ...

    @property
    def file(self) -> str:
        """The plan's file, for messages."""
        ...

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices, such as cpu or gpu; empty for ranks of a communicator."""
        ...

    @property
    def typed(self) -> bool:
        """Whether JAX types values by the axes over which they vary, as inside a shard_map."""
        ...

    @property
    def service(self) -> ServerAccess | None:
        """The servers of the plan; None if it has none."""
        ...

    @property
    def variadic(self) -> bool:
        """Whether all-reduces accept several arrays, so that packing large ones has no advantage."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether collectives overlap with computation and each other. Then large arrays are best sent
        separately, as soon as they are ready.
        """
        ...

    def combiner_scope(self, key: str) -> contextlib.AbstractContextManager[Any]:
        """A context whose collectives the compiler combines only with those of the same `key`."""
        ...

    def ways(self, axes: tuple[str, ...]) -> int:
        """The number of ranks along `axes`."""
        ...

    def index(self, axes: str | tuple[str, ...]) -> Array:
        """This rank's index along `axes`, row-major, the first axis major: an i32 scalar, or an int."""
        ...

    def varying(self, x: Array, axes: tuple[str, ...]) -> Array:
        """`x`, typed as varying over `axes`, too. No communication."""
        ...

    def same(self, x: Array, axes: tuple[str, ...]) -> Array:
        """`x`, typed as the same over `axes`; only for values that are proved the same. No communication."""
        ...

    def tie(self, x: Array, previous: Array, axes: tuple[str, ...]) -> Array:
        """`x`, unchanged, ordered after `previous`.

        Args:
            x: The operand of a collective.
            previous: An array that must be available before the collective begins.
            axes: The axes of the collective.
        """
        ...

    def ordered_after(
        self, xs: Sequence[Array], previous: Sequence[Array], axes: tuple[str, ...]
    ) -> tuple[list[Array], list[Array]]:
        """Order the operands of a collective after other arrays.

        Args:
            xs: The operands of the collective.
            previous: Arrays that must be available before the collective begins.
            axes: The axes of the collective.

        Returns:
            `xs` and `previous`, unchanged. Callers must use the returned `previous` instead of the original.
        """
        ...

    def wait_for(self, xs: Sequence[Array]) -> None:
        """Order the following operations of a hidden phase after `xs`, if they would block computation."""
        ...

    def after_begun(self, xs: Sequence[Array]) -> list[Array]:
        """`xs`, ordered after the operations that have begun, if computation could delay these."""
        ...

    def move(self, x: Array, op: Collective) -> Array:
        """Run the collective `op` on one array.

        - all_reduce: sum, maximum or minimum over `op.axes`, with the shape and dtype of `x`. For booleans,
          sum and maximum are `or`, minimum is `and`.
        - reduce_scatter: a sum; each rank keeps its rows. The leading dimension is a multiple of the ranks.
        - all_gather: the leading dimensions of all ranks are concatenated, the first axis major.
        - all_to_all: row i of [n*k] is sent to rank i; received rows are in rank order.
        - broadcast: `x` of rank `op.root`, counted row-major over `op.axes`, bit for bit.
        - reduce: as all_reduce on rank `op.root`; unspecified on other ranks.
        - swap: as all_to_all.
        - shift: each rank receives `x` of the rank `op.root` places before it, cyclically.
        """
        ...

    def start_packed(
        self, xs: Sequence[Array], op: Collective, operand_layout: BufferLayout, result_layout: BufferLayout
    ) -> Callable[[], Sequence[Array]] | None:
        """Begin the collective of a buffer without creating the buffer.

        Args:
            xs: Arrays of one dtype that make up the operand buffer.
            op: The collective. If its form is not `split`, it may already be complete on return.
            operand_layout: The positions of `xs` in the operand buffer.
            result_layout: The positions of the results in the result buffer.

        Returns:
            A function that completes the collective and returns its results; None if the buffers must be
            created.
        """
        ...

    def start(self, x: Array, op: Collective) -> Callable[[], Array] | None:
        """Begin the collective. The returned function completes it; None if the backend cannot split it.

        Other operations may run in between, including other started collectives. Callers complete all of them
        before the phase ends.
        """
        ...
