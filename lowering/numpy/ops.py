"""The ops of a schedule on NumPy arrays: local ops on one rank's leaves, collectives on those of a group.

`run.NumpyRun` calls them for each leaf. `ways` is always a number of shards or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan.ir import schedule as ir
from commplan.ir.fragments import FragmentLayout
from commplan.ir.types import DType
from commplan.lowering import blocks

Array = npt.NDArray[Any]
# The ufunc of each reduction.
_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of `dtype`. bf16 requires `ml_dtypes`, a dependency of JAX."""
    if dtype is DType.BF16:
        import ml_dtypes  # noqa: PLC0415  only for bf16

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype.numpy_name)


def _bits(x: Array, dtype: Any) -> Array:
    return np.ascontiguousarray(x).view(dtype)


def _library(op: ir.Encode | ir.Decode) -> blocks.Library:
    """NumPy's functions. 8-bit floats require `ml_dtypes`, a dependency of JAX."""
    if op.codec.name != "f8e4m3":
        return blocks.Library(np, _bits, None)
    import ml_dtypes  # noqa: PLC0415  only for 8-bit floats

    return blocks.Library(np, _bits, ml_dtypes.float8_e4m3fn)


def encode(x: Array, op: ir.Encode) -> Array:
    """The bytes of a buffer of floats."""
    with np.errstate(all="ignore"):
        return blocks.encode(x, op.codec, op.rows, _library(op))


def decode(x: Array, op: ir.Decode) -> Array:
    """The floats of a buffer of bytes."""
    with np.errstate(all="ignore"):
        values = blocks.decode(x, op.codec, op.rows, op.width, op.dtype, _library(op))
    return values.astype(numpy_dtype(op.dtype))


def pad(x: Array, ways: int) -> Array:
    """`x` with zero rows added until its leading dimension is a multiple of `ways`."""
    return np.concatenate([x, np.zeros((-len(x) % ways, *x.shape[1:]), x.dtype)])


def rows(x: Array, ways: int, *, is_array: bool) -> Array:
    """A leaf as zero-padded rows; [ways, columns].

    An array's leading dimension is padded to a multiple of `ways`, so each row holds whole slices of it. A
    tree's leaf is flattened and padded.
    """
    x = pad(x, ways) if is_array and x.ndim else x
    return pad(x.reshape(-1), ways).reshape(ways, -1)


def shard(x: Array, index: int, ways: int, *, is_array: bool) -> Array:
    """Shard `index` of `ways` of a leaf, zero-padded to equal shards.

    An array is split along its leading dimension. A tree's leaf is flattened first. A scalar stays whole.
    """
    if x.ndim == 0:
        return x
    return np.split(pad(x if is_array else x.reshape(-1), ways), ways)[index]


def pick(x: Array, fragment: int, layout: FragmentLayout) -> Array:
    """The piece of a leaf that fragment number `fragment` holds, flattened; see `ir.fragments`.

    With one fragment, the piece is the leaf itself.
    """
    if layout.fragments == 1:
        return x
    table, columns = rows(x, layout.ways, is_array=False), layout.columns(x.size)
    start = min(fragment * columns, table.shape[1] - columns)
    return table[:, start : start + columns].reshape(-1)


def merge(x: Array, piece: Array, fragment: int, layout: FragmentLayout) -> Array:
    """`x` with fragment number `fragment` replaced by `piece`, the inverse of `pick`."""
    if layout.fragments == 1:
        return piece
    table, columns = rows(x, layout.ways, is_array=False).copy(), layout.columns(x.size)
    first = fragment * columns
    owned = table[:, first : first + columns]
    owned[:] = piece.reshape(layout.ways, columns)[:, columns - owned.shape[1] :]
    return table.reshape(-1)[: x.size].reshape(x.shape)


def unshard(shards: Sequence[Array], leaf: ir.Leaf) -> Array:
    """The leaf whose shards are `shards`, in order; padding is removed. All shards of a scalar are equal."""
    if not leaf.shape:
        return shards[0]
    return np.concatenate([x.reshape(-1) for x in shards])[: leaf.size].reshape(leaf.shape)


def pack(op: ir.Pack, leaf: ir.Leaf, parts: Sequence[tuple[ir.Part, Array, bool]]) -> Array:
    """The flat buffer of a pack; see `ir.Pack`.

    Args:
        op: The pack.
        leaf: The buffer's size and dtype.
        parts: The parts, each with the leaf that it is part of, and whether this is an array (see `rows`).
    """
    buffer = np.zeros((op.ways, leaf.size // op.ways), numpy_dtype(leaf.dtype))
    for part, x, is_array in parts:
        columns = rows(x, op.ways, is_array=is_array)[:, part.start : part.start + part.size]
        buffer[:, part.offset : part.offset + part.size] = columns
    return buffer.reshape(-1)


def unpack(ways: int, leaf: ir.Leaf, parts: Sequence[tuple[ir.Part, Array]]) -> Array:
    """One leaf from flat buffers; the inverse of `pack`.

    Args:
        ways: The number of rows of each buffer.
        leaf: The shape and dtype of the leaf.
        parts: The parts of the leaf, in any order, each with the buffer that holds it.
    """
    runs = [
        buffer.reshape(ways, -1)[:, part.offset : part.offset + part.size]
        for part, buffer in sorted(parts, key=lambda pair: pair[0].start)
    ]
    flat = np.concatenate(runs, axis=1) if runs else np.zeros((ways, 0), numpy_dtype(leaf.dtype))
    return flat.reshape(-1)[: leaf.size].reshape(leaf.shape)


def scale(x: Array, how: str, by: Any, over: Any = None) -> Array:
    """A leaf times or divided by a factor; see `ir.Scale`.

    Floats are computed in f32 at least, and rounded once. Integers are unchanged by a factor of 1 and by a
    ratio. A scalar of 0 as factor or denominator gives zeros, even for NaN.

    Args:
        x: The leaf.
        how: `mul` to multiply by the factor, `div` to divide by it.
        by: The factor: a Python number, or a scalar that the plan computes.
        over: The denominator of a ratio, if the factor is `by / over`; None if it is `by`.
    """
    is_float = np.dtype(x.dtype).kind not in "iub"
    is_number = isinstance(by, int | float)
    if not is_float and (over is not None or by == 1):
        return x
    if not is_number and (by == 0 or (over is not None and over == 0)):
        return np.zeros_like(x)
    wide = np.promote_types(x.dtype, np.float32) if is_float else x.dtype
    factor = np.asarray(by if over is None else by / over).astype(wide)
    product = x.astype(wide) * factor if how == "mul" else x.astype(wide) / factor
    return product.astype(x.dtype)


def pull(x: Array, center: Array, eta: Any, rho: Any) -> Array:
    """eta * rho * (x - center), the force of elastic averaging (Zhang, Choromanska, LeCun 2015).

    Computed in f32 at least, and rounded once to the dtype of `x`.

    Args:
        x: The worker's leaf.
        center: The same leaf of the center.
        eta, rho: The rates: Python numbers or scalar arrays.
    """
    wide = np.promote_types(x.dtype, np.float32)
    factor = np.asarray(eta, wide) * np.asarray(rho, wide)
    return ((x.astype(wide) - center.astype(wide)) * factor).astype(x.dtype)


def collective(op: ir.Collective, xs: Sequence[Array], target: ir.Leaf, *, is_array: bool) -> list[Array]:
    """Run a collective on one leaf of each rank of a group.

    Sums add the terms in rank order, and round to the dtype of the leaf after each addition.

    Args:
        op: The collective.
        xs: The operand of each rank, in the order of the group.
        target: The shape of the result of an all-gather.
        is_array: Whether a reduce-scatter splits along the leading dimension (see `shard`).

    Returns:
        The result of each rank. For a reduce, ranks other than the root receive zeros.
    """
    ways, root = len(xs), op.root or 0
    match op.kind:
        case "all_gather":
            return [unshard(xs, target)] * ways
        case "broadcast":
            return [xs[root]] * ways
        case "shift":
            return [xs[index - root] for index in range(ways)]
        case "swap" | "all_to_all":
            blocks = [np.split(x, ways) for x in xs]
            return [np.concatenate([block[index] for block in blocks]) for index in range(ways)]
        case "all_reduce" | "reduce" | "reduce_scatter":
            combine = _COMBINE[op.op or "sum"]
            total: Array = reduce(lambda a, b: combine(a, b).astype(a.dtype), xs)
            if op.kind == "reduce_scatter":
                return [shard(total, index, ways, is_array=is_array) for index in range(ways)]
            is_everywhere = op.kind == "all_reduce"
            return [
                total if is_everywhere or index == root else np.zeros_like(total) for index in range(ways)
            ]
