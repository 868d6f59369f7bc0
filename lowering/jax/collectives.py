"""One collective on one array, inside a shard_map: from the schedule's words to `jax.lax`.

Results that the schedule calls `same` are typed so, which `out_specs=P()` and later reductions need.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from commplan.diagnostics import fail
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Collective
from commplan.lowering.jax import _compat, order
from commplan.lowering.jax.ops import pad
from commplan.lowering.jax.untyped import jax, jnp, lax

Array = Any

_BITS: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


@dataclasses.dataclass(frozen=True)
class LaxBackend:
    """The devices of a mesh, seen from inside a shard_map over its axes: see `backend.Backend`.

    `platform` is cpu, gpu, ...; `sizes` those of the axes.
    """

    platform: str
    sizes: Mapping[str, int]
    file: str = ""

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

    def all_reduce(self, x: Array, op: Collective) -> Array:
        return all_reduce(x, op, self)

    def reduce_scatter(self, x: Array, op: Collective) -> Array:
        return reduce_scatter(x, op, self)

    def all_gather(self, x: Array, op: Collective) -> Array:
        return all_gather(x, op, self)

    def all_to_all(self, x: Array, op: Collective) -> Array:
        return all_to_all(x, op, self)

    def broadcast(self, x: Array, op: Collective) -> Array:
        return broadcast(x, op, self)

    def start(self, x: Array, op: Collective) -> None:
        """XLA makes its collectives asynchronous itself."""
        del x, op


def levels(op: Collective, backend: LaxBackend) -> tuple[str, ...]:
    """The axes level by level, inner first, of a `hierarchical` algorithm; () for `native`.

    Raises `CommplanError` CP0808 for an algorithm that is not lowered to JAX.
    """
    own = op.algorithm.levels
    names = [how.name for _, how in own] or [op.algorithm.name]
    if any(name != "native" for name in names):
        _refuse(op.algorithm, op, backend)
    return tuple(axis for axis, _ in own)


def _refuse(algorithm: Algorithm, op: Collective, backend: LaxBackend) -> None:
    fail(
        "CP0808",
        f"`via {algorithm}` is not lowered to JAX yet",
        "leave `via` out, or write `via native`, or `via hierarchical(...)` with native levels",
        span=op.span,
        file=backend.file,
    )


def all_reduce(x: Array, op: Collective, backend: LaxBackend) -> Array:
    """Sum, maximum or minimum over `op.axes`; the same shape and dtype. Booleans: or, or, and."""
    if x.dtype == jnp.bool_:
        combine = lax.pmin if op.op == "min" else lax.pmax
        return combine(x.astype(jnp.uint8), op.axes) != 0
    if op.op in ("max", "min"):
        return (lax.pmax if op.op == "max" else lax.pmin)(x, op.axes)
    inner_first = levels(op, backend)
    if len(inner_first) < 2 or x.ndim == 0:
        return lax.psum(x, op.axes)
    *inner, outer = inner_first
    flat = pad(x.reshape(-1), backend.ways(tuple(inner)))
    for axis in inner:
        flat = lax.psum_scatter(flat, axis, tiled=True)
    flat = lax.psum(flat, outer)
    for axis in reversed(inner):
        flat = _compat.all_gather_same(flat, (axis,))
    return flat[: x.size].reshape(x.shape)


def reduce_scatter(x: Array, op: Collective, backend: LaxBackend) -> Array:
    """Sum over `op.axes`; each rank keeps its rows of the leading dimension, a multiple of the ranks."""
    levels(op, backend)
    return lax.psum_scatter(x, op.axes, tiled=True)


def all_gather(x: Array, op: Collective, backend: LaxBackend) -> Array:
    """The leading dimensions of all ranks one after another, first named axis major."""
    levels(op, backend)
    return _moved(lambda moved: _compat.all_gather_same(moved, op.axes), x, backend)


def all_to_all(x: Array, op: Collective, backend: LaxBackend) -> Array:
    """Row i of [n*k] goes to rank i; the rows that arrive stand in rank order."""
    return _moved(lambda moved: lax.all_to_all(moved, op.axes, 0, 0, tiled=True), x, backend)


def broadcast(x: Array, op: Collective, backend: LaxBackend) -> Array:
    """`x` of rank `op.root`, counted row-major over `op.axes`, bit for bit.

    Where the backend has no broadcast this is a sum of integers of which all but one are zero:
    a sum of floats would turn -0.0 into 0.0 and might quiet a NaN.
    """
    root = op.root or 0
    inner_first = levels(op, backend)
    if len(inner_first) < 2:
        return _broadcast(x, op.axes, root, backend)
    place: dict[str, int] = {}
    for axis in reversed(op.axes):
        root, place[axis] = divmod(root, backend.sizes[axis])
    for axis in reversed(inner_first):
        x = _broadcast(x, (axis,), place[axis], backend)
    return x


def _broadcast(x: Array, axes: tuple[str, ...], root: int, backend: LaxBackend) -> Array:
    if backend.platform == "gpu":
        return _compat.broadcast_native(x, axes, root)

    def from_root(moved: Array) -> Array:
        return lax.psum(jnp.where(lax.axis_index(axes) == root, moved, jnp.zeros_like(moved)), axes)

    return _moved(from_root, x, backend, always=True)


def _moved(move: Callable[[Array], Array], x: Array, backend: LaxBackend, *, always: bool = False) -> Array:
    """`move(x)`, where `move` only carries elements about, carried as integers where floats might change.

    Integers have no derivative, and JAX takes that of a bitcast for zero: `move` is linear, so its
    derivative is itself.
    """
    if not (always or backend.on_cpu):
        return move(x)
    bits = _to_bits(x, always=always)
    if bits.dtype == x.dtype or x.dtype == jnp.bool_:
        return _from_bits(move(bits), x)

    @jax.custom_jvp
    def carried(x: Array) -> Array:
        return _from_bits(move(_to_bits(x, always=always)), x)

    def derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return carried(*primals), move(*tangents)

    carried.defjvp(derivative)
    return carried(x)


def _to_bits(x: Array, *, always: bool = False) -> Array:
    """Floats as integers of their width: those of 2 bytes, which XLA:CPU would widen on the way, or all."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if not jnp.issubdtype(x.dtype, jnp.floating) or (x.dtype.itemsize != 2 and not always):
        return x
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def _from_bits(moved: Array, original: Array) -> Array:
    if moved.dtype == original.dtype:
        return moved
    if original.dtype == jnp.bool_:
        return moved.astype(jnp.bool_)
    return lax.bitcast_convert_type(moved, original.dtype)
