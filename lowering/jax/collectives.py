"""One collective on one array, inside a shard_map: from the schedule's words to `jax.lax`.

Results that the schedule calls `same` are typed so, which `out_specs=P()` and later reductions need: by `lax`
of what is native, by their proof of what programs make.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commplan.collectives.program import Program
from commplan.ir.schedule import Collective, Spread
from commplan.lowering.jax import _compat, levels, order, programs
from commplan.lowering.jax.backend import Lay
from commplan.lowering.jax.bits import as_bits, with_derivative
from commplan.lowering.jax.untyped import jnp, lax
from commplan.lowering.programs import levels as levels_of
from commplan.lowering.programs import program_of

Array = Any


@dataclasses.dataclass(frozen=True)
class LaxBackend:
    """The devices of a mesh, seen from inside a shard_map over its axes: see `backend.Backend`.

    `platform` is cpu, gpu, ...; `sizes` those of the axes; `spread` the topology's levels that each spans.
    """

    platform: str
    sizes: Mapping[str, int]
    file: str = ""
    spread: Mapping[str, tuple[Spread, ...]] = dataclasses.field(default_factory=dict[str, Any])

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

    def ways(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: str | tuple[str, ...]) -> Array:
        return lax.axis_index(axes)

    def varying(self, x: Array, axes: tuple[str, ...]) -> Array:
        return _compat.as_varying(x, axes)

    def same(self, x: Array, axes: tuple[str, ...]) -> Array:
        return _compat.assume_same(x, axes)

    def tie(self, x: Array, previous: Array, axes: tuple[str, ...]) -> Array:
        axis = max(axes, key=lambda name: self.sizes[name])
        return x if self.sizes[axis] == 1 else order.tie(x, previous, axis, on_cpu=self.on_cpu)

    def move(self, x: Array, op: Collective) -> Array:
        return getattr(self, op.kind)(x, op)

    def all_reduce(self, x: Array, op: Collective) -> Array:
        """Sum, maximum or minimum over `op.axes`; the same shape and dtype. Booleans: or, or, and."""
        native = self._native_all_reduce
        program = self._program(op, x.nbytes)
        if program is not None:
            made = self._run(program, x.reshape(-1), op, lambda x: native(x, op))
            return made.reshape(x.shape)
        stairs = self._stairs(op)
        if len(stairs.own) < 2 or x.ndim == 0 or x.dtype == jnp.bool_:
            return native(x, op)
        if stairs.is_plain:
            return native(x, op) if op.op != "sum" else stairs.all_reduce(x.reshape(-1)).reshape(x.shape)
        made = self._differentiated(stairs.all_reduce, x.reshape(-1), op, lambda x: native(x, op))
        return made.reshape(x.shape)

    def reduce_scatter(self, x: Array, op: Collective) -> Array:
        """Sum over `op.axes`; each rank keeps its rows of the leading dimension, a multiple of the ranks."""

        def native(flat: Array) -> Array:
            return lax.psum_scatter(flat, op.axes, tiled=True)

        rows = x.shape[0] // self.ways(op.axes)
        program = self._program(op, x.nbytes)
        if program is not None:
            made = self._run(program, x.reshape(-1), op, native)
            return made.reshape(rows, *x.shape[1:])
        stairs = self._stairs(op)
        if len(stairs.own) < 2:
            return native(x)
        made = self._differentiated(stairs.reduce_scatter, x.reshape(-1), op, native)
        return made.reshape(rows, *x.shape[1:])

    def all_gather(self, x: Array, op: Collective) -> Array:
        """The leading dimensions of all ranks one after another, first named axis major."""

        def native(moved: Array) -> Array:
            return _compat.all_gather_same(moved, op.axes)

        ways = self.ways(op.axes)
        program = self._program(op, x.nbytes * ways)
        if program is not None:
            made = self._run(program, x.reshape(-1), op, native)
            return made.reshape(ways * x.shape[0], *x.shape[1:])
        stairs = self._stairs(op)
        if len(stairs.own) < 2:
            return self._carried(native, x)
        made = self._differentiated(stairs.all_gather, x.reshape(-1), op, native)
        return made.reshape(ways * x.shape[0], *x.shape[1:])

    def all_to_all(self, x: Array, op: Collective) -> Array:
        """Row i of [n*k] goes to rank i; the rows that arrive stand in rank order."""
        return self._carried(lambda moved: lax.all_to_all(moved, op.axes, 0, 0, tiled=True), x)

    def broadcast(self, x: Array, op: Collective) -> Array:
        """`x` of rank `op.root`, counted row-major over `op.axes`, bit for bit."""
        root = op.root or 0

        def native(moved: Array) -> Array:
            return levels.sum_from(moved, op.axes, root)

        program = self._program(op, x.nbytes)
        if program is not None:
            return self._run(program, x.reshape(-1), op, native).reshape(x.shape)
        stairs = self._stairs(op)
        if len(stairs.own) < 2:
            return levels.broadcast(x, op.axes, root, self.platform)
        if stairs.is_plain:
            return stairs.broadcast(x, root)
        made = self._differentiated(lambda x: stairs.broadcast(x, root), x.reshape(-1), op, native)
        return made.reshape(x.shape)

    def together(self, xs: Sequence[Array], op: Collective, taken: Lay, given: Lay) -> None:
        """XLA fuses what makes a buffer with what makes its parts."""
        del xs, op, taken, given

    def reduce(self, x: Array, op: Collective) -> Array:
        """Sum, maximum or minimum over `op.axes` on rank `op.root`; elsewhere anything.

        XLA has no reduction to one rank: where no program is taken, all get the result.
        """
        program, native = self._program(op, x.nbytes), self._native_all_reduce
        if program is None:
            return native(x, op)
        return self._run(program, x.reshape(-1), op, lambda x: native(x, op)).reshape(x.shape)

    def start(self, x: Array, op: Collective) -> None:
        """XLA makes its collectives asynchronous itself."""
        del x, op

    def _native_all_reduce(self, x: Array, op: Collective) -> Array:
        if x.dtype == jnp.bool_:
            combine = lax.pmin if op.op == "min" else lax.pmax
            return combine(x.astype(jnp.uint8), op.axes) != 0
        return {"max": lax.pmax, "min": lax.pmin}.get(op.op or "sum", lax.psum)(x, op.axes)

    def _program(self, op: Collective, nbytes: int) -> Program | None:
        return program_of(op, self.sizes, self.spread, nbytes, self.file)

    def _stairs(self, op: Collective) -> levels.Stairs:
        own = levels_of(op, self.sizes, self.spread, self.file)
        return levels.Stairs(op, own, self.ways(op.axes), self.platform, self.file)

    def _run(self, program: Program, flat: Array, op: Collective, native: Callable[[Array], Array]) -> Array:
        team = programs.everyone(op.axes, program.ranks)
        how = op.op or "sum"
        return self._differentiated(
            lambda flat: programs.run(program, flat, team, how, on_cpu=self.on_cpu), flat, op, native
        )

    def _differentiated(
        self, move: Callable[[Array], Array], flat: Array, op: Collective, native: Callable[[Array], Array]
    ) -> Array:
        """`move(flat)`, typed as the schedule says, its derivative that of the native collective."""
        scattered = op.kind in ("reduce_scatter", "reduce")

        def typed(flat: Array) -> Array:
            made = move(flat)
            return made if scattered else _compat.assume_same(made, op.axes)

        def refused(_: Array) -> Array:
            raise NotImplementedError(f"JAX does not differentiate {op.op} over ranks")

        if not jnp.issubdtype(flat.dtype, jnp.floating):
            return typed(flat)
        return with_derivative(typed, refused if op.op in ("max", "min") else native, flat)

    def _carried(self, move: Callable[[Array], Array], x: Array) -> Array:
        """`move(x)`, where `move` only carries elements about; as integers where XLA would widen floats."""
        return as_bits(move, x) if self.on_cpu else move(x)
