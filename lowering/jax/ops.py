"""The local ops of a schedule on one rank's arrays: pack, unpack, cast, scale, slice and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commplan.diagnostics import Span, fail
from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.ir.refs import base_name
from commplan.ir.types import DType
from commplan.lowering.jax.pytree import LEAF, Tree
from commplan.lowering.jax.typing_shim import jax, jnp, lax

Array = Any
Values = Mapping[str, ir.Value]
Env = Mapping[str, Tree]
ENABLE_X64 = "64-bit types need jax.config.update('jax_enable_x64', True)"


def jax_dtype(name: str) -> Any:
    """The dtype of a plan (`bf16`) as JAX names it."""
    return jnp.dtype(DType(name).numpy_name)


def checked_dtype(dtype: DType, result: str, span: Span, file: str) -> Any:
    """The dtype of a conversion on the way to `result`. Raises CP0805 if JAX would take a narrower one."""
    wanted = jax_dtype(dtype)
    actual = jax.dtypes.canonicalize_dtype(wanted)
    if actual != wanted:
        name = name_of(base_name(result))
        message = f"the plan converts to {dtype} on the way to `{name}`, and JAX would convert to {actual}"
        fail("CP0805", message, ENABLE_X64, span=span, file=file)
    return wanted


def pad(x: Array, ways: int) -> Array:
    """`x` with zero rows added until its leading dimension is a multiple of `ways`."""
    missing = -x.shape[0] % ways
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def rows(leaf: Array, ways: int, *, array: bool) -> Array:
    """A leaf as `ways` rows: flattened and zero-padded; of an array the leading dimension is padded."""
    if array and leaf.ndim:
        leaf = pad(leaf, ways)
    return pad(leaf.reshape(-1), ways).reshape(ways, -1)


def pack(op: ir.Pack, values: Values, env: Env) -> Tree:
    """One flat buffer of `ways` rows from the parts, zero where no part lies."""
    leaf = values[op.result].leaves[0]
    width = leaf.size // op.ways
    pieces: list[Array] = []
    at = 0
    for part in sorted(op.parts, key=lambda part: part.offset):
        if part.size == 0:
            continue
        if part.offset > at:
            pieces.append(jnp.zeros((op.ways, part.offset - at), jax_dtype(leaf.dtype)))
        table = rows(env[part.value].leaves[part.leaf], op.ways, array=values[part.value].kind == "array")
        pieces.append(_columns(table, part.start, part.size))
        at = part.offset + part.size
    if at < width:
        pieces.append(jnp.zeros((op.ways, width - at), jax_dtype(leaf.dtype)))
    return Tree((_join(pieces, op.ways, leaf.dtype).reshape(-1),), LEAF)


def unpack(
    op: ir.Unpack, values: Values, env: Env, arrived: Mapping[str, Mapping[int, Array]]
) -> tuple[Array, ...]:
    """The leaves of the result from runs of columns of buffers, padding dropped.

    arrived: of buffers that were not made the runs, by where they would lie; a run that is a whole leaf has
    its shape.
    """
    value = values[op.result]
    parts: list[list[ir.Part]] = [[] for _ in value.leaves]
    for part in op.parts:
        parts[part.leaf].append(part)
    leaves: list[Array] = []
    for leaf, own in zip(value.leaves, parts, strict=True):
        if (whole := _whole(leaf, own, arrived)) is not None:
            leaves.append(whole)
            continue
        pieces = [
            arrived[part.value][part.offset].reshape(op.ways, -1)
            if part.value in arrived
            else _columns(env[part.value].leaves[0].reshape(op.ways, -1), part.offset, part.size)
            for part in sorted(own, key=lambda part: part.start)
            if part.size
        ]
        flat = _join(pieces, op.ways, leaf.dtype).reshape(-1)
        leaves.append(_head(flat, leaf.size).reshape(leaf.shape))
    return tuple(leaves)


def _whole(
    leaf: ir.Leaf, parts: Sequence[ir.Part], arrived: Mapping[str, Mapping[int, Array]]
) -> Array | None:
    """`leaf` itself, where it arrived as it is."""
    parts = [part for part in parts if part.size]
    if len(parts) != 1 or parts[0].value not in arrived:
        return None
    array = arrived[parts[0].value][parts[0].offset]
    return array if array.shape == leaf.shape else None


def _columns(table: Array, start: int, size: int) -> Array:
    return table if size == table.shape[1] else lax.slice_in_dim(table, start, start + size, axis=1)


def _head(flat: Array, size: int) -> Array:
    return flat if flat.shape[0] == size else flat[:size]


def _join(pieces: Sequence[Array], ways: int, dtype: DType) -> Array:
    if not pieces:
        return jnp.zeros((ways, 0), jax_dtype(dtype))
    if len(pieces) == 1:
        return pieces[0]
    if ways == 1:  # XLA:CPU fuses a concatenation of one dimension, not one of two
        return jnp.concatenate([piece.reshape(-1) for piece in pieces]).reshape(1, -1)
    return jnp.concatenate(pieces, axis=1)


def shard(leaf: Array, place: Any, ways: int, *, array: bool) -> Array:
    """Rows `place` of `ways` of a leaf. A leaf of a tree is flattened first; a scalar stays whole."""
    if leaf.ndim == 0:
        return leaf
    padded = pad(leaf if array else leaf.reshape(-1), ways)
    size = padded.shape[0] // ways
    return lax.dynamic_slice_in_dim(padded, place * size, size)


def number(place: Any, owners: Sequence[int]) -> Any:
    """Where `place` stands among `owners`; 0 where it does not."""
    return sum(jnp.where(jnp.equal(place, rank), index, 0) for index, rank in enumerate(owners))


def mask_to_root(leaf: Array, keep: Any) -> Array:
    """`leaf` where `here` is true, else zeros."""
    return jnp.where(keep, leaf, jnp.zeros_like(leaf))


def unshard(flat: Array, leaf: ir.Leaf) -> Array:
    """The way back from all ranks' cuts one after another: padding dropped, shape restored."""
    return _head(flat.reshape(-1), leaf.size).reshape(leaf.shape)


def scale(leaf: Array, how: str, by: Any, over: Any = None) -> Array:
    """See `ir.ops.Scale`: `leaf` times or divided by a number; times a scalar, or times the share of it in
    another. Floats are multiplied in f32 at least, or divided in their type if that holds the number, and
    rounded once; times zero is zero."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    wide = jnp.promote_types(leaf.dtype, jnp.float32) if is_float else leaf.dtype
    if isinstance(by, int | float):
        if by == 1:
            return leaf
        with np.errstate(over="ignore"):
            if how == "div" and float(np.asarray(by).astype(leaf.dtype)) == by:  # rounded once too
                wide = leaf.dtype
        factor = jnp.asarray(by, wide)
        return (leaf.astype(wide) * factor if how == "mul" else leaf.astype(wide) / factor).astype(leaf.dtype)
    if not is_float:
        return leaf if over is not None else leaf * by.astype(leaf.dtype)
    nothing = by == 0
    factor = by.astype(jnp.promote_types(by.dtype, wide))
    if over is not None:
        nothing |= over == 0
        factor = factor / jnp.where(nothing, jnp.ones_like(factor), over.astype(factor.dtype))
    factor = factor.astype(wide)
    term = jnp.where(nothing, jnp.zeros_like(leaf), leaf).astype(wide)
    return (term * jnp.where(nothing, jnp.zeros_like(factor), factor)).astype(leaf.dtype)


def converted(
    op: ir.Cast | ir.LocalSum | ir.Scale,
    leaf: Array,
    file: str,
    by: Any = None,
    over: Any = None,
    number: int = 0,
) -> Array:
    """What `op` makes of one leaf, `number` of its tree. file: the plan's. by, over: those of a scale."""
    match op:
        case ir.Cast():
            dtype = op.dtype[number] if isinstance(op.dtype, tuple) else op.dtype
            return leaf.astype(checked_dtype(dtype, op.result, op.span, file))
        case ir.LocalSum():
            return leaf.reshape(op.ways, -1).sum(0, dtype=leaf.dtype)
        case ir.Scale():
            return scale(leaf, op.how, by, over)


def pull(leaf: Array, center: Array, eta: Any, rho: Any) -> Array:
    """eta * rho * (leaf - center): elastic averaging's force (Zhang, Choromanska, LeCun 2015)."""
    wide = jnp.promote_types(leaf.dtype, jnp.float32)  # in which no product of two rates is lost
    factor = jnp.asarray(eta, wide) * jnp.asarray(rho, wide)
    return ((leaf.astype(wide) - center.astype(wide)) * factor).astype(leaf.dtype)
