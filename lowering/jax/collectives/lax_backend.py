"""One collective on one array, inside a shard_map: from the schedule's words to `jax.lax`.

Results that the schedule calls `same` are typed so, which `out_specs=P()` and later reductions need: by `lax`
of what is native, by their proof of what programs make.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commplan.ir.schedule import Collective, Spread
from commplan.lowering.jax import _compat
from commplan.lowering.jax.backend import BufferLayout
from commplan.lowering.jax.collectives import hierarchical, native, order, programs, variadic
from commplan.lowering.jax.collectives.bitcast import as_bits, as_ordered, with_derivative
from commplan.lowering.jax.primitives import assume_same
from commplan.lowering.jax.typing_shim import jnp, lax
from commplan.lowering.programs import NATIVE, program_of
from commplan.lowering.programs import levels as levels_of

Array = Any
# Collectives whose results JAX types as varying over their axes.
VARYING = ("reduce_scatter", "all_to_all", "swap", "shift")


@dataclass(frozen=True)
class LaxBackend:
    """The devices of a mesh, seen from inside a shard_map over its axes: see `backend.Backend`.

    `platform` is cpu, gpu, ...; `sizes` those of the axes; `spread` the topology's levels that each spans.
    `alone`: the mesh has no other axes, over which arrays may be cut.
    """

    platform: str
    sizes: Mapping[str, int]
    file: str = ""
    spread: Mapping[str, tuple[Spread, ...]] = field(default_factory=dict[str, Any])
    alone: bool = True

    @property
    def service(self) -> None:
        """Servers are no devices."""
        return None

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def typed(self) -> bool:
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        return bool(axes) and _compat.tracks_varying(axes[0])

    @property
    def variadic(self) -> bool:
        return self.asynchronous and variadic.wanted()

    @property
    def asynchronous(self) -> bool:
        return self.platform == "gpu"

    def apart(self, key: str) -> contextlib.AbstractContextManager[Any]:
        return native.combined_apart(key) if self.asynchronous else contextlib.nullcontext()

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
        # No element of an array that is cut over other axes is at hand on all devices: the barrier must do.
        return order.tie(x, previous, axis, on_cpu=self.on_cpu and self.alone)

    def behind(
        self, xs: Sequence[Array], previous: Sequence[Array], axes: tuple[str, ...]
    ) -> tuple[list[Array], list[Array]]:
        if self.ways(axes) > 1 and not (self.on_cpu and self.alone):
            return order.barred(xs, previous)
        tied = list(xs)
        for before in previous:
            tied = [self.tie(x, before, axes) for x in tied]
        return tied, list(previous)

    def move(self, x: Array, op: Collective) -> Array:
        ways, gathers = self.ways(op.axes), op.kind == "all_gather"
        if ways == 1:
            return self._identity(x, op)
        if op.op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
            return as_ordered(lambda ordered: self.move(ordered, op), x, op.op)
        program = program_of(op, self.sizes, self.spread, x.nbytes * (ways if gathers else 1), self.file)
        if program is not None:
            team, how = programs.everyone(op.axes, program.ranks), op.op or "sum"

            def rounds(flat: Array) -> Array:
                return programs.run(program, flat, team, how, on_cpu=self.on_cpu)

            result = self._differentiated(rounds, x.reshape(-1), op)
        else:
            own = levels_of(op.algorithm, op.axes, self.sizes, self.spread)
            stairs = hierarchical.HierarchicalCollective(op, own, ways, self.platform, self.file)
            if len(own) < 2 or op.kind == "reduce" or (op.kind == "all_reduce" and stairs.is_one_for(x)):
                return self._native(x, op)
            if stairs.is_plain and op.kind in ("all_reduce", "broadcast"):
                return stairs.run(x.reshape(-1)).reshape(x.shape)
            result = self._differentiated(stairs.run, x.reshape(-1), op)
        if gathers:
            return result.reshape(ways * x.shape[0], *x.shape[1:])
        return result.reshape(x.shape if op.kind != "reduce_scatter" else (x.shape[0] // ways, *x.shape[1:]))

    def start_packed(
        self, xs: Sequence[Array], op: Collective, taken: BufferLayout, given: BufferLayout
    ) -> Callable[[], Sequence[Array]] | None:
        """An all-reduce of XLA's own, of arrays as they are where the step is compiled so (see `variadic`).

        Elsewhere XLA fuses what makes a buffer with what makes its parts. A barrier and a key keep XLA from
        making one operation of two buckets, or of a bucket and what the step reduces beside the plan. On one
        rank nothing is packed or unpacked."""
        is_identity = self.ways(op.axes) == 1
        cut = variadic.pieces(taken, given) if is_identity or self._is_variadic(op) else None
        if cut is None:
            return None
        if is_identity:
            parts = [self._identity(self.varying(variadic.part(xs, piece.run), op.axes), op) for piece in cut]
            return lambda: variadic.parted(parts, [[piece] for piece in cut], given)
        arrays, held = variadic.joined([self.varying(x, op.axes) for x in xs], cut)
        with self.apart(op.result):
            moved = [self.move(x, op) for x in arrays]
        return lambda: variadic.parted(moved[: len(held)], held, given)

    def _is_variadic(self, op: Collective) -> bool:
        levels = levels_of(op.algorithm, op.axes, self.sizes, self.spread)
        native = op.algorithm.name == NATIVE and len(levels) < 2 and op.kind == "all_reduce"
        return native and self.variadic

    def start(self, x: Array, op: Collective) -> None:
        """XLA makes its collectives asynchronous itself."""

    def _identity(self, x: Array, op: Collective) -> Array:
        """The collective `op` of one rank: `x`, typed as the collective's result."""
        return x if op.kind in VARYING else self.same(x, op.axes)

    def _native(self, x: Array, op: Collective) -> Array:
        """XLA's own collective, or what comes nearest; as integers where XLA would widen what is only
        carried about."""
        if op.kind == "broadcast":
            return hierarchical.broadcast(x, op.axes, op.root or 0, self.platform)
        if op.op is None and self.on_cpu:
            return as_bits(lambda moved: self._linear(moved, op), x)
        return self._linear(x, op)

    def _linear(self, x: Array, op: Collective) -> Array:
        """XLA's own collective as JAX differentiates it."""
        match op.kind:
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
            case _:  # XLA has no reduction to one rank: all get the result
                return self._native_all_reduce(x, op)

    def _native_all_reduce(self, x: Array, op: Collective) -> Array:
        if x.dtype == jnp.bool_:
            combine = lax.pmin if op.op == "min" else lax.pmax
            return combine(x.astype(jnp.uint8), op.axes) != 0
        return {"max": lax.pmax, "min": lax.pmin}.get(op.op or "sum", lax.psum)(x, op.axes)

    def _differentiated(self, move: Callable[[Array], Array], flat: Array, op: Collective) -> Array:
        """`move(flat)`, typed as the schedule says, its derivative that of the native collective."""
        varies = op.kind in VARYING or op.kind == "reduce"

        def typed(flat: Array) -> Array:
            result = move(flat)
            return result if varies else assume_same(result, op.axes)

        if not jnp.issubdtype(flat.dtype, jnp.floating):
            return typed(flat)
        return with_derivative(typed, lambda flat: self._linear(flat, op), flat)
