"""The local ops of a schedule on one rank's arrays: pack, unpack, cast, scale, slice and arithmetic.

`ways` is always a number of shards or of rows. `array` is whether a leaf is that of an array, whose leading
dimension is split, rather than of a tree, whose leaves are flattened before they are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax

from commplan.diagnostics import Span, fail
from commplan.ir import schedule as ir
from commplan.ir.fragments import FragmentLayout
from commplan.ir.plan import name_of
from commplan.ir.refs import base_name
from commplan.ir.types import DType
from commplan.lowering import blocks
from commplan.lowering.jax.pytree import LEAF, Tree

Values = Mapping[str, ir.Value]  # the values of a phase by id
Env = Mapping[str, Tree]  # the trees of values by id
_LIBRARY = blocks.Library(jnp, lax.bitcast_convert_type, ml_dtypes.float8_e4m3fn)
# The note of errors about disabled 64-bit types.
ENABLE_X64 = "64-bit types need jax.config.update('jax_enable_x64', True)"


def jax_dtype(name: str) -> Any:
    """The JAX dtype of a type of the plan, such as `bf16`. It may be disabled; see `checked_dtype`."""
    return jnp.dtype(DType(name).numpy_name)


def checked_dtype(dtype: DType, result: str, span: Span, file: str) -> Any:
    """The JAX dtype of `dtype`.

    Args:
        dtype: The type to which the plan converts.
        result: The id of the value that the conversion is for, for errors.
        span: The location in the plan, for errors.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0805 if JAX would use a narrower dtype, because 64-bit types are disabled.
    """
    expected = jax_dtype(dtype)
    actual = jax.dtypes.canonicalize_dtype(expected)
    if actual != expected:
        name = name_of(base_name(result))
        message = f"the plan converts to {dtype} to compute `{name}`, but JAX would convert to {actual}"
        fail("CP0805", message, ENABLE_X64, span=span, file=file)
    return expected


def pad(x: Array, ways: int) -> Array:
    """`x`, padded with zero rows so that its leading dimension is a multiple of `ways`."""
    missing = -x.shape[0] % ways
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def rows(leaf: Array, ways: int, *, array: bool) -> Array:
    """A leaf as zero-padded rows; [ways, columns].

    The leading dimension of an array is padded to a multiple of `ways`, so each row holds whole slices of it.
    A tree's leaf is flattened and padded.
    """
    if array and leaf.ndim:
        leaf = pad(leaf, ways)
    return pad(leaf.reshape(-1), ways).reshape(ways, -1)


def pack(op: ir.Pack, values: Values, env: Env) -> Tree:
    """The flat buffer of a pack: `op.ways` rows one after the other, with zeros between the parts."""
    leaf = values[op.result].leaves[0]
    width = leaf.size // op.ways
    pieces: list[Array] = []
    filled = 0
    for part in sorted(op.parts, key=lambda part: part.offset):
        if part.size == 0:
            continue
        if part.offset > filled:
            pieces.append(jnp.zeros((op.ways, part.offset - filled), jax_dtype(leaf.dtype)))
        table = rows(env[part.value].leaves[part.leaf], op.ways, array=values[part.value].kind == "array")
        pieces.append(_columns(table, part.start, part.size))
        filled = part.offset + part.size
    if filled < width:
        pieces.append(jnp.zeros((op.ways, width - filled), jax_dtype(leaf.dtype)))
    return Tree((_join(pieces, op.ways, leaf.dtype).reshape(-1),), LEAF)


def unpack(
    op: ir.Unpack, values: Values, env: Env, received: Mapping[str, Mapping[int, Array]]
) -> tuple[Array, ...]:
    """The leaves of the result, from columns of buffers, without padding.

    Args:
        op: The unpack.
        values: The values of the phase by id.
        env: The buffers that were created.
        received: The parts of buffers that were not created, by the id of the buffer and the offset of the
            part. A part that is a whole leaf has the shape of the leaf.
    """
    value = values[op.result]
    parts: list[list[ir.Part]] = [[] for _ in value.leaves]
    for part in op.parts:
        parts[part.leaf].append(part)
    leaves: list[Array] = []
    for leaf, leaf_parts in zip(value.leaves, parts, strict=True):
        if (whole := _whole(leaf, leaf_parts, received)) is not None:
            leaves.append(whole)
            continue
        pieces = [
            received[part.value][part.offset].reshape(op.ways, -1)
            if part.value in received
            else _columns(env[part.value].leaves[0].reshape(op.ways, -1), part.offset, part.size)
            for part in sorted(leaf_parts, key=lambda part: part.start)
            if part.size
        ]
        flat = _join(pieces, op.ways, leaf.dtype).reshape(-1)
        leaves.append(_head(flat, leaf.size).reshape(leaf.shape))
    return tuple(leaves)


def _whole(
    leaf: ir.Leaf, parts: Sequence[ir.Part], received: Mapping[str, Mapping[int, Array]]
) -> Array | None:
    """The array of `leaf` if it was received as a whole; otherwise None."""
    parts = [part for part in parts if part.size]
    if len(parts) != 1 or parts[0].value not in received:
        return None
    array = received[parts[0].value][parts[0].offset]
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
    if ways == 1:  # XLA:CPU fuses a concatenation in one dimension, not in two
        return jnp.concatenate([piece.reshape(-1) for piece in pieces]).reshape(1, -1)
    return jnp.concatenate(pieces, axis=1)


def shard(leaf: Array, place: Any, ways: int, *, array: bool) -> Array:
    """One shard of a leaf that is zero-padded to `ways` equal shards; a scalar is not split.

    Args:
        leaf: The leaf.
        place: The index of the shard, an int or an i32 scalar.
        ways: The number of shards.
        array: Whether it is the leaf of an array.
    """
    if leaf.ndim == 0:
        return leaf
    padded = pad(leaf if array else leaf.reshape(-1), ways)
    size = padded.shape[0] // ways
    return lax.dynamic_slice_in_dim(padded, place * size, size)


def pick(leaf: Array, fragment: Array, layout: FragmentLayout) -> Array:
    """The piece of a leaf that fragment number `fragment` holds, flattened; see `ir.fragments`.

    With one fragment, the piece is the leaf itself.
    """
    if layout.fragments == 1:
        return leaf
    columns = layout.columns(leaf.size)
    table = rows(leaf, layout.ways, array=False)
    start = jnp.minimum(fragment * columns, table.shape[1] - columns)
    return lax.dynamic_slice_in_dim(table, start, columns, 1).reshape(-1)


def merge(leaf: Array, piece: Array, fragment: Array, layout: FragmentLayout) -> Array:
    """`leaf` with fragment number `fragment` replaced by `piece`, the inverse of `pick`."""
    if layout.fragments == 1:
        return piece
    columns = layout.columns(leaf.size)
    table = rows(leaf, layout.ways, array=False)
    # The window of the last fragment is moved back to fit; its first columns belong to the fragment before.
    start = jnp.minimum(fragment * columns, table.shape[1] - columns)
    is_inside = start + jnp.arange(columns, dtype=start.dtype) >= fragment * columns
    window = lax.dynamic_slice_in_dim(table, start, columns, 1)
    window = jnp.where(is_inside, piece.reshape(window.shape), window)
    return _head(lax.dynamic_update_slice_in_dim(table, window, start, 1).reshape(-1), leaf.size).reshape(
        leaf.shape
    )


def owner_index(rank: Any, owners: Sequence[int]) -> Any:
    """The index of `rank` in `owners`; 0 if it is not an owner."""
    return sum(jnp.where(jnp.equal(rank, owner), index, 0) for index, owner in enumerate(owners))


def mask_to_root(leaf: Array, keep: Any) -> Array:
    """`leaf` if the scalar `keep` is true, otherwise zeros."""
    return jnp.where(keep, leaf, jnp.zeros_like(leaf))


def unshard(flat: Array, leaf: ir.Leaf) -> Array:
    """Restore a leaf from the concatenated shards of all ranks: drop the padding and reshape."""
    return _head(flat.reshape(-1), leaf.size).reshape(leaf.shape)


def scale(leaf: Array, how: str, by: Any, over: Any = None) -> Array:
    """Multiply or divide `leaf` by a factor (see `ir.ops.Scale`).

    Floats are multiplied in f32 or wider, divided in their own dtype if it can represent the number, and
    rounded once. A ratio leaves integers unchanged. A float times a scalar or a ratio is zero if the scalar,
    the numerator or the denominator is zero, even for NaN.

    Args:
        leaf: The leaf.
        how: `mul` or `div`; used if the factor is a number, as scalars and ratios always multiply.
        by: The factor, a Python number or a scalar array; or the numerator of a ratio, a scalar array.
        over: The denominator of a ratio, a scalar array; None if the factor is `by`.
    """
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    wide = jnp.promote_types(leaf.dtype, jnp.float32) if is_float else leaf.dtype
    if isinstance(by, int | float):
        if by == 1:
            return leaf
        with np.errstate(over="ignore"):
            if how == "div" and float(np.asarray(by).astype(leaf.dtype)) == by:  # also rounded once
                wide = leaf.dtype
        factor = jnp.asarray(by, wide)
        return (leaf.astype(wide) * factor if how == "mul" else leaf.astype(wide) / factor).astype(leaf.dtype)
    if not is_float:
        return leaf if over is not None else leaf * by.astype(leaf.dtype)
    is_zero = by == 0
    factor = by.astype(jnp.promote_types(by.dtype, wide))
    if over is not None:
        is_zero |= over == 0
        factor = factor / jnp.where(is_zero, jnp.ones_like(factor), over.astype(factor.dtype))
    factor = factor.astype(wide)
    term = jnp.where(is_zero, jnp.zeros_like(leaf), leaf).astype(wide)
    return (term * jnp.where(is_zero, jnp.zeros_like(factor), factor)).astype(leaf.dtype)


def converted(
    op: ir.Cast | ir.LocalSum | ir.Scale | ir.Encode | ir.Decode,
    leaf: Array,
    file: str,
    by: Any = None,
    over: Any = None,
    leaf_index: int = 0,
) -> Array:
    """Apply `op` to one leaf.

    Args:
        op: The op.
        leaf: The leaf.
        file: The plan's file, for errors.
        by: The factor of a scale; see `scale`.
        over: The denominator of a scale; see `scale`.
        leaf_index: The index of the leaf in its tree, for a cast with one dtype for each leaf.

    Raises:
        CommplanError: See `checked_dtype`.
    """
    match op:
        case ir.Cast():
            dtype = op.dtype[leaf_index] if isinstance(op.dtype, tuple) else op.dtype
            return leaf.astype(checked_dtype(dtype, op.result, op.span, file))
        case ir.LocalSum():
            return leaf.reshape(op.ways, -1).sum(0, dtype=leaf.dtype)
        case ir.Scale():
            return scale(leaf, op.how, by, over)
        case ir.Encode():
            return encode(leaf, op)
        case ir.Decode():
            dtype = checked_dtype(op.dtype, op.result, op.span, file)
            return blocks.decode(leaf, op.codec, op.rows, op.width, op.dtype, _LIBRARY).astype(dtype)


def encode(leaf: Array, op: ir.Encode) -> Array:
    """The bytes of a buffer of floats.

    Raises:
        NotImplementedError: When differentiated, since the derivative of a rounded value is zero.
    """

    @jax.custom_jvp
    def encoded(x: Array) -> Array:
        return blocks.encode(x, op.codec, op.rows, _LIBRARY)

    @encoded.defjvp
    def _(*_: Any) -> NoReturn:
        raise NotImplementedError(f"{op.codec} has no derivative: call the phase with the gradient")

    return encoded(leaf)


def pull(leaf: Array, center: Array, eta: Any, rho: Any) -> Array:
    """eta * rho * (leaf - center), the force of elastic averaging (Zhang, Choromanska, LeCun 2015).

    Computed in f32 or wider, and rounded once to the dtype of `leaf`.

    Args:
        leaf: The worker's leaf.
        center: The same leaf of the center.
        eta, rho: The rates: Python numbers or scalar arrays.
    """
    wide = jnp.promote_types(leaf.dtype, jnp.float32)  # wide enough for the product of the rates
    factor = jnp.asarray(eta, wide) * jnp.asarray(rho, wide)
    return ((leaf.astype(wide) - center.astype(wide)) * factor).astype(leaf.dtype)
