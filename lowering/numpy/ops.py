"""The ops of a schedule on NumPy arrays: local ops on one rank's leaves, collectives on those of a group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan.ir import schedule as ir
from commplan.ir.fragments import FragmentLayout
from commplan.ir.types import DType

Array = npt.NDArray[Any]
_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of `dtype`. bf16 requires `ml_dtypes`, a dependency of JAX."""
    if dtype is DType.BF16:
        import ml_dtypes  # noqa: PLC0415  only for bf16

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype.numpy_name)


def pad(x: Array, ways: int) -> Array:
    """`x` with zero rows added until its leading dimension is a multiple of `ways`."""
    return np.concatenate([x, np.zeros((-len(x) % ways, *x.shape[1:]), x.dtype)])


def rows(x: Array, ways: int, *, is_array: bool) -> Array:
    """A leaf as `ways` zero-padded rows. A tree leaf is flattened; an array's leading dimension is padded."""
    x = pad(x, ways) if is_array and x.ndim else x
    return pad(x.reshape(-1), ways).reshape(ways, -1)


def shard(x: Array, index: int, ways: int, *, is_array: bool) -> Array:
    """Shard `index` of `ways` of a leaf. A tree leaf is flattened first; a scalar stays whole."""
    if x.ndim == 0:
        return x
    return np.split(pad(x if is_array else x.reshape(-1), ways), ways)[index]


def pick(x: Array, fragment: int, layout: FragmentLayout) -> Array:
    """The piece of fragment `fragment` of a leaf; see `ir.fragments`."""
    if layout.fragments == 1:
        return x
    table, columns = rows(x, layout.ways, is_array=False), layout.columns(x.size)
    start = min(fragment * columns, table.shape[1] - columns)
    return table[:, start : start + columns].reshape(-1)


def merge(x: Array, piece: Array, fragment: int, layout: FragmentLayout) -> Array:
    """`x` with fragment `fragment` replaced by `piece`."""
    if layout.fragments == 1:
        return piece
    table, columns = rows(x, layout.ways, is_array=False).copy(), layout.columns(x.size)
    first = fragment * columns
    owned = table[:, first : first + columns]
    owned[:] = piece.reshape(layout.ways, columns)[:, columns - owned.shape[1] :]
    return table.reshape(-1)[: x.size].reshape(x.shape)


def unshard(shards: Sequence[Array], leaf: ir.Leaf) -> Array:
    """The leaf of which `shards` are the shards, without padding."""
    if not leaf.shape:
        return shards[0]
    return np.concatenate([x.reshape(-1) for x in shards])[: leaf.size].reshape(leaf.shape)


def pack(op: ir.Pack, leaf: ir.Leaf, parts: Sequence[tuple[ir.Part, Array, bool]]) -> Array:
    """One flat buffer from parts, each with its leaf and whether this is an array; see `ir.Pack`."""
    buffer = np.zeros((op.ways, leaf.size // op.ways), numpy_dtype(leaf.dtype))
    for part, x, is_array in parts:
        columns = rows(x, op.ways, is_array=is_array)[:, part.start : part.start + part.size]
        buffer[:, part.offset : part.offset + part.size] = columns
    return buffer.reshape(-1)


def unpack(ways: int, leaf: ir.Leaf, parts: Sequence[tuple[ir.Part, Array]]) -> Array:
    """One leaf from columns of flat buffers of `ways` rows."""
    runs = [
        buffer.reshape(ways, -1)[:, part.offset : part.offset + part.size]
        for part, buffer in sorted(parts, key=lambda pair: pair[0].start)
    ]
    flat = np.concatenate(runs, axis=1) if runs else np.zeros((ways, 0), numpy_dtype(leaf.dtype))
    return flat.reshape(-1)[: leaf.size].reshape(leaf.shape)


def scale(x: Array, how: str, by: Any, over: Any = None) -> Array:
    """A leaf times or divided by a number, times a scalar, or times the ratio of two; see `ir.Scale`."""
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
    """eta * rho * (x - center), the force of elastic averaging (Zhang, Choromanska, LeCun 2015)."""
    wide = np.promote_types(x.dtype, np.float32)
    factor = np.asarray(eta, wide) * np.asarray(rho, wide)
    return ((x.astype(wide) - center.astype(wide)) * factor).astype(x.dtype)


def collective(op: ir.Collective, xs: Sequence[Array], target: ir.Leaf, *, is_array: bool) -> list[Array]:
    """One leaf of each rank of a group, in rank order, after the collective."""
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
