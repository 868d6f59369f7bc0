"""Lowers one collective on one array to `jax.lax`, inside a shard_map.

Results that are the same on all ranks are typed so, as `out_specs=P()` and later reductions require. For
native collectives `lax` does this; for programs it is asserted, based on their proof.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from commplan.collectives.program import ChunkProgram
from commplan.ir.collective_kinds import TAKES_BLOCKS
from commplan.ir.schedule import Collective, Spread
from commplan.lowering.jax import _compat, variadic
from commplan.lowering.jax.backend import BufferLayout
from commplan.lowering.jax.collectives import hierarchical, native, order, programs
from commplan.lowering.jax.collectives.bitcast import as_bits, as_ordered, with_derivative
from commplan.lowering.jax.primitives import assume_same
from commplan.lowering.programs import NATIVE, is_plain, native_kind, under_xla

# Collectives whose results vary over their axes.
VARYING = (*TAKES_BLOCKS, "shift")


@dataclass(frozen=True)
class LaxBackend:
    """Implements `backend.Backend` for the devices of a mesh, inside a shard_map over its axes.

    The protocol documents the methods.

    Attributes:
        platform: The platform, such as cpu or gpu.
        sizes: The sizes of the axes of the plan.
        file: The plan's file, for errors.
        spread: The levels of the topology that each axis spans; see `lowering.programs.spreads`.
        is_whole_mesh: Whether the mesh has no other axes, over which arrays may be sharded.
    """

    platform: str
    sizes: Mapping[str, int]
    file: str = ""
    spread: Mapping[str, tuple[Spread, ...]] = field(default_factory=dict[str, Any])
    is_whole_mesh: bool = True

    @property
    def service(self) -> None:
        """None: servers are not devices."""
        return None

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.platform == "cpu"

    @property
    def typed(self) -> bool:
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        return bool(axes) and _compat.tracks_varying(axes[0])

    @property
    def variadic(self) -> bool:
        return self.asynchronous and variadic.is_enabled()

    @property
    def asynchronous(self) -> bool:
        return self.platform == "gpu"

    def combiner_scope(self, key: str) -> contextlib.AbstractContextManager[Any]:
        return native.combiner_scope(key) if self.asynchronous else contextlib.nullcontext()

    def ways(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: str | tuple[str, ...]) -> Array:
        return lax.axis_index(axes)

    def varying(self, x: Array, axes: tuple[str, ...]) -> Array:
        return _compat.as_varying(x, axes)

    def same(self, x: Array, axes: tuple[str, ...]) -> Array:
        return assume_same(x, axes)

    def tie(self, x: Array, previous: Array, axes: tuple[str, ...]) -> Array:
        axis = max(axes, key=lambda name: self.sizes[name])
        if self.sizes[axis] == 1:
            return x
        # If an array is sharded over other axes, no element is present on all devices, so a barrier is used.
        return order.tie(x, previous, axis, on_cpu=self.on_cpu and self.is_whole_mesh)

    def ordered_after(
        self, xs: Sequence[Array], previous: Sequence[Array], axes: tuple[str, ...]
    ) -> tuple[list[Array], list[Array]]:
        if self.ways(axes) > 1 and not (self.on_cpu and self.is_whole_mesh):
            return order.with_barriers(xs, previous)
        tied = list(xs)
        for before in previous:
            tied = [self.tie(x, before, axes) for x in tied]
        return tied, list(previous)

    def wait_for(self, xs: Sequence[Array]) -> None:
        """No effect: XLA orders collectives by their operands and overlaps them with computation."""

    def after_begun(self, xs: Sequence[Array]) -> list[Array]:
        """`xs`; see `wait_for`."""
        return list(xs)

    def move(self, x: Array, op: Collective) -> Array:
        ways, gathers = self.ways(op.axes), op.kind == "all_gather"
        if ways == 1:
            return self._identity(x, op)
        # Extremes of floats are computed on integers, which this method then receives.
        if op.op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
            return as_ordered(lambda ordered: self.move(ordered, op), x, op.op)
        nbytes, is_divisible = x.nbytes * (ways if gathers else 1), x.ndim > 0 and x.dtype != jnp.bool_
        form = under_xla(op, self.sizes, self.spread, nbytes, is_divisible=is_divisible, file=self.file)
        if form is None:
            return self._native(x, op)
        if isinstance(form, ChunkProgram):
            groups, reduction = programs.all_ranks(op.axes, form.ranks), op.op or "sum"

            def rounds(flat: Array) -> Array:
                return programs.run(form, flat, groups, reduction, on_cpu=self.on_cpu)

            result = self._with_derivative(rounds, x.reshape(-1), op)
        else:
            hierarchy = hierarchical.HierarchicalCollective(op, form, ways, self.platform, self.file)
            # Native collectives over whole axes have derivatives and types of their own.
            if is_plain(form) and op.kind in ("all_reduce", "broadcast"):
                return hierarchy.run(x.reshape(-1)).reshape(x.shape)
            result = self._with_derivative(hierarchy.run, x.reshape(-1), op)
        if gathers:
            return result.reshape(ways * x.shape[0], *x.shape[1:])
        return result.reshape(x.shape if op.kind != "reduce_scatter" else (x.shape[0] // ways, *x.shape[1:]))

    def start_packed(
        self, xs: Sequence[Array], op: Collective, operand_layout: BufferLayout, result_layout: BufferLayout
    ) -> Callable[[], Sequence[Array]] | None:
        """Begin an all-reduce of arrays without packing them, if the step is compiled for it (`variadic`).

        A combiner key keeps XLA from combining the bucket with other reductions of the step. On one rank, no
        collective of any kind is packed. Returns None if the buffer must be created.
        """
        is_identity = self.ways(op.axes) == 1
        if not is_identity and not self._is_variadic(op):
            return None
        pieces = variadic.pieces(operand_layout, result_layout)
        if pieces is None:
            return None
        if is_identity:
            arrays = [self.varying(variadic.part(xs, piece.run), op.axes) for piece in pieces]
            parts = [self._identity(x, op) for x in arrays]
            return lambda: variadic.split_results(parts, [[piece] for piece in pieces], result_layout)
        arrays, groups = variadic.operands([self.varying(x, op.axes) for x in xs], pieces)
        with self.combiner_scope(op.result):
            moved = [self.move(x, op) for x in arrays]
        return lambda: variadic.split_results(moved[: len(groups)], groups, result_layout)

    def _is_variadic(self, op: Collective) -> bool:
        return self.variadic and op.kind == "all_reduce" and op.algorithm.name == NATIVE

    def start(self, x: Array, op: Collective) -> None:
        """None: collectives are not split, because XLA itself makes them asynchronous."""

    def _identity(self, x: Array, op: Collective) -> Array:
        """The collective `op` of one rank: `x`, typed as its result."""
        return x if op.kind in VARYING else self.same(x, op.axes)

    def _native(self, x: Array, op: Collective) -> Array:
        """XLA's own collective, or the closest one; on integers if XLA:CPU would widen the floats."""
        if op.kind == "broadcast":
            return hierarchical.broadcast(x, op.axes, op.root or 0, self.platform)
        if op.op is None and self.on_cpu:
            return as_bits(lambda moved: self._linear(moved, op), x)
        return self._linear(x, op)

    def _linear(self, x: Array, op: Collective) -> Array:
        """XLA's own collective in a form that JAX differentiates. Its derivative is used for programs too."""
        match native_kind(op):
            case "reduce_scatter":
                return lax.psum_scatter(x, op.axes, tiled=True)
            case "all_gather":
                return native.all_gather_same(x, op.axes)
            case "all_to_all" | "swap":
                return lax.all_to_all(x, op.axes, 0, 0, tiled=True)
            case "shift":
                ranks = self.ways(op.axes)
                return lax.ppermute(x, op.axes, [(r, (r + (op.root or 0)) % ranks) for r in range(ranks)])
            case "broadcast":
                return hierarchical.sum_from(x, op.axes, op.root or 0)
            case _:
                return self._native_all_reduce(x, op)

    def _native_all_reduce(self, x: Array, op: Collective) -> Array:
        if x.dtype == jnp.bool_:
            combine = lax.pmin if op.op == "min" else lax.pmax
            return combine(x.astype(jnp.uint8), op.axes) != 0
        return {"max": lax.pmax, "min": lax.pmin}.get(op.op or "sum", lax.psum)(x, op.axes)

    def _with_derivative(self, move: Callable[[Array], Array], flat: Array, op: Collective) -> Array:
        """`move(flat)`, typed as in the schedule, with the derivative of the native collective."""
        varies = op.kind in VARYING or op.kind == "reduce"

        def typed(flat: Array) -> Array:
            result = move(flat)
            return result if varies else assume_same(result, op.axes)

        if not jnp.issubdtype(flat.dtype, jnp.floating):
            return typed(flat)
        return with_derivative(typed, lambda flat: self._linear(flat, op), flat)
