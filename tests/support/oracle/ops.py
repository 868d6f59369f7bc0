"""The meaning of each op of a schedule, for all ranks at once.

A clear definition, not a fast one: loops over ranks, and sums in rank order in the dtype of the operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from commplan.collectives.registry import scalar_algorithm
from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.lowering.programs import program_of

from .codec import from_bytes, to_bytes
from .layout import Grid, Held, Rank, cut, join, pad_rows
from .numbers import Array, combine, convert, divide, multiply, storage, weighted, wide
from .programs import execute

Values = Mapping[str, ir.Value]
Env = Mapping[str, Held]


@dataclass(frozen=True)
class View:
    """The view of one rank: its leaves of a value, and its position."""

    values: Values
    env: Env
    grid: Grid
    rank: Rank
    number_of_call: int = 0  # calls of the phase before this one

    def __getitem__(self, ref: str) -> tuple[Array, ...]:
        return self.env[ref][self.rank]

    def leaves(self, ref: str) -> Sequence[ir.Leaf]:
        """The declared leaves of a value in the schedule."""
        return self.values[ref].leaves

    def number(self, by: str | float) -> Any:
        """A number, or this rank's own scalar."""
        return self[by][0] if isinstance(by, str) else by


def pack(op: ir.Pack, view: View) -> tuple[Array, ...]:
    """`ways` rows; each holds the runs of columns that the parts name, and zeros elsewhere."""
    leaf = view.leaves(op.result)[0]
    buffer = np.zeros(leaf.size, storage(leaf.dtype)).reshape(op.ways, -1)
    for part in op.parts:
        rows = _rows(view[part.value][part.leaf], op.ways, view.values[part.value])
        buffer[:, part.offset : part.offset + part.size] = rows[:, part.start : part.start + part.size]
    return (buffer.reshape(-1),)


def _rows(array: Array, ways: int, value: ir.Value) -> Array:
    """A leaf as `ways` rows: flattened and padded; an array's leading dimension is padded instead."""
    if value.kind == "array" and array.ndim:
        array = pad_rows(array, ways)
    return pad_rows(array.reshape(-1), ways).reshape(ways, -1)


def unpack(op: ir.Unpack, view: View) -> tuple[Array, ...]:
    """Leaves from the runs of columns of buffers: padding dropped, shapes restored."""
    leaves: list[Array] = []
    for number, leaf in enumerate(view.leaves(op.result)):
        width = _rows(np.zeros(leaf.shape, np.bool_), op.ways, view.values[op.result]).shape[1]
        rows = np.zeros((op.ways, width), storage(leaf.dtype))
        for part in op.parts:
            if part.leaf == number:
                buffer = view[part.value][0].reshape(op.ways, -1)
                columns = buffer[:, part.offset : part.offset + part.size]
                rows[:, part.start : part.start + part.size] = columns
        leaves.append(rows.reshape(-1)[: leaf.size].reshape(leaf.shape))
    return tuple(leaves)


def cast(op: ir.Cast, view: View) -> tuple[Array, ...]:
    """Every leaf converted to the type of the result's, rounded to nearest even if that is narrower."""
    leaves = zip(view[op.operand], view.leaves(op.result), strict=True)
    return tuple(convert(array, leaf.dtype) for array, leaf in leaves)


def local_sum(op: ir.LocalSum, view: View) -> tuple[Array, ...]:
    """The `ways` rows of a flat buffer, added from first to last."""
    rows = view[op.operand][0].reshape(op.ways, -1)
    return (_fold("sum", list(rows), view.leaves(op.operand)[0].dtype),)


def scale(op: ir.Scale, view: View) -> tuple[Array, ...]:
    """Every leaf times or divided by a number; or times each rank's own scalar, or its share in another.
    Rounded once to the leaf's dtype."""
    pairs = zip(view.leaves(op.operand), view[op.operand], strict=True)
    if isinstance(op.by, str):
        whole = 1 if op.over is None else view.number(op.over)
        return tuple(weighted(array, view.number(op.by), whole, leaf.dtype) for leaf, array in pairs)
    change = multiply if op.how == "mul" else divide
    return tuple(change(array, op.by, leaf.dtype) for leaf, array in pairs)


def encode(op: ir.Encode, view: View) -> tuple[Array, ...]:
    """The bytes of every row, one row after the other."""
    rows = view[op.operand][0].reshape(op.rows, -1)
    return (np.concatenate([to_bytes(row, op.codec) for row in rows]),)


def decode(op: ir.Decode, view: View) -> tuple[Array, ...]:
    """The elements of every row, one row after the other."""
    rows = view[op.operand][0].reshape(op.rows, -1)
    return (np.concatenate([from_bytes(row, op.codec, op.width, op.dtype) for row in rows]),)


def slice_(op: ir.Slice, view: View) -> tuple[Array, ...]:
    """The rank keeps the cut that its place along the axes names (see `layout.cut`)."""
    tree = view.values[op.operand].kind == "tree"
    ways = len(op.owners) or view.grid.size(op.axes)
    place = view.grid.position(view.rank, op.axes)
    if op.owners:
        place = op.owners.index(place) if place in op.owners else 0
    return tuple(cut(leaf, ways, place, tree=tree) for leaf in view[op.operand])


def pick(op: ir.Pick, view: View) -> tuple[Array, ...]:
    """From every row of a leaf, a window that covers the columns of the current fragment."""
    if op.fragments == 1:
        return view[op.operand]
    return tuple(_windows(op, leaf, view, op.operand)[0].reshape(-1) for leaf in view[op.operand])


def merge(op: ir.Merge, view: View) -> tuple[Array, ...]:
    """Every column of the current fragment replaced by that of the piece."""
    leaves: list[Array] = []
    for leaf, piece in zip(view[op.whole], view[op.piece], strict=True):
        window, columns, is_owned = _windows(op, leaf, view, op.whole)
        rows = pad_rows(leaf.reshape(-1), len(window)).reshape(len(window), -1).copy()
        rows[:, columns[is_owned]] = piece.reshape(len(window), -1)[:, is_owned]
        leaves.append(rows.reshape(-1)[: leaf.size].reshape(leaf.shape))
    return tuple(leaves)


def _windows(op: ir.Pick | ir.Merge, leaf: Array, view: View, ref: str) -> tuple[Array, Array, Array]:
    """The window of a leaf, its columns, and whether the current fragment owns each of them.

    Fragments are equally many columns each, the last ones fewer.
    """
    is_row = bool(op.rows) and view.values[ref].placement.split == op.rows
    ways = 1 if is_row else view.grid.size(op.rows)
    rows = pad_rows(leaf.reshape(-1), ways).reshape(ways, -1)
    every = np.arange(rows.shape[1])
    each = -(-len(every) // op.fragments)
    owner, fragment = every // max(each, 1), view.number_of_call % op.fragments
    columns = every[min(fragment * each, len(every) - each) :][:each]
    return rows[:, columns], columns, owner[columns] == fragment


def elastic(op: ir.Elastic, view: View) -> tuple[Array, ...]:
    """pull = eta rho (W - C), the pull towards the center of Zhang, Choromanska and LeCun (2015)."""
    eta, rho = view.number(op.eta), view.number(op.rho)
    pulls: list[Array] = []
    for leaf, array, center in zip(view.leaves(op.operand), view[op.operand], view[op.center], strict=True):
        own_type, dtype = leaf.dtype, wide(leaf.dtype)
        factor = multiply(convert(eta, dtype), rho, dtype)
        difference = np.subtract(convert(array, dtype), convert(center, dtype))
        pulls.append(convert(multiply(convert(difference, dtype), factor, dtype), own_type))
    return tuple(pulls)


def update(op: ir.Update, view: View) -> tuple[Array, ...]:
    """The new center: operand + delta, leaf by leaf, rounded once to the leaf's dtype."""
    leaves = zip(view.leaves(op.operand), view[op.operand], view[op.delta], strict=True)
    return tuple(combine("sum", array, delta, leaf.dtype) for leaf, array, delta in leaves)


def collective(op: ir.Collective, values: Values, env: Env, grid: Grid) -> Held:
    """Leaf by leaf within each group of ranks.

    Sums of a chunk program are made in its order; others in the order of the ranks. A mean divides the sum,
    or the terms if it is made in f16.
    """
    source, target = values[op.operand], values[op.result]
    buffers: dict[Rank, list[Array]] = {rank: [] for rank in grid.ranks}
    for group in grid.groups(op.axes):
        for number, leaf in enumerate(source.leaves):
            arrays = [env[op.operand][rank][number] for rank in group]
            first = op.divisor > 1 and op.hints.divides_first(leaf.dtype)
            if first:
                arrays = [divide(array, op.divisor, leaf.dtype) for array in arrays]
            results = _exchange(op, arrays, leaf, target.leaves[number], grid, tree=source.kind == "tree")
            if op.divisor > 1 and not first:
                results = [divide(result, op.divisor, leaf.dtype) for result in results]
            for rank, result in zip(group, results, strict=True):
                buffers[rank].append(result)
    return {rank: tuple(leaves) for rank, leaves in buffers.items()}


def _exchange(
    op: ir.Collective, arrays: list[Array], leaf: ir.Leaf, target: ir.Leaf, grid: Grid, *, tree: bool
) -> list[Array]:
    """One leaf of every rank of a group, in rank order, before and after the collective."""
    if op.kind == "all_gather" and not leaf.shape:  # a scalar of a split tree was never cut
        return [join(arrays, target)] * len(arrays)
    if op.kind == "reduce_scatter" and not leaf.shape:
        op = replace(op, kind="all_reduce", algorithm=scalar_algorithm(op.algorithm))
    flat = _flat(op, arrays, tree=tree)
    whole = len(flat[0]) * leaf.dtype.nbytes * (len(arrays) if op.kind == "all_gather" else 1)
    program = program_of(op, grid.sizes, grid.spreads, whole, grid.file)
    if program is not None and leaf.size:
        buffers = execute(program, flat, op.op or "sum", leaf.dtype)
        if op.kind == "reduce":
            buffers = _at(op.root or 0, buffers)
        return [each[: target.size].reshape(target.shape) for each in buffers]
    ways = len(arrays)
    match op.kind:
        case "all_reduce":
            return [_fold(op.op, arrays, leaf.dtype)] * ways
        case "reduce_scatter":
            total = _fold(op.op, arrays, leaf.dtype)
            return [cut(total, ways, place, tree=tree) for place in range(ways)]
        case "all_gather":
            return [join(arrays, target)] * ways
        case "swap":
            blocks = [np.split(array.reshape(target.shape), ways) for array in arrays]
            return [np.concatenate([block[place] for block in blocks]) for place in range(ways)]
        case "all_to_all":
            rows = [array.reshape(ways, -1) for array in arrays]
            return [np.concatenate([row[place] for row in rows]) for place in range(ways)]
        case "broadcast":
            return [arrays[op.root or 0]] * ways
        case "shift":
            return [arrays[place - (op.root or 0)] for place in range(ways)]
        case "reduce":
            return _at(op.root or 0, [_fold(op.op, arrays, leaf.dtype)] * ways)


def _at(root: int, arrays: Sequence[Array]) -> list[Array]:
    """Of the results of a reduction that of `root`, and zeros elsewhere."""
    return [array if rank == root else np.zeros_like(array) for rank, array in enumerate(arrays)]


def _flat(op: ir.Collective, arrays: list[Array], *, tree: bool) -> list[Array]:
    """The operand of a collective, one-dimensional; padded if it is split."""
    if op.kind != "reduce_scatter":
        return [array.reshape(-1) for array in arrays]
    rows = [array.reshape(-1) if tree else array for array in arrays]
    return [pad_rows(each, len(arrays)).reshape(-1) for each in rows]


def _fold(op: str | None, arrays: Sequence[Array], dtype: DType) -> Array:
    how = op if op == "max" or op == "min" else "sum"
    return functools.reduce(lambda total, array: combine(how, total, array, dtype), arrays)


LOCAL: Mapping[type[ir.Op], Callable[[Any, View], tuple[Array, ...]]] = {
    ir.Pack: pack,
    ir.Unpack: unpack,
    ir.Cast: cast,
    ir.LocalSum: local_sum,
    ir.Scale: scale,
    ir.Encode: encode,
    ir.Decode: decode,
    ir.Slice: slice_,
    ir.Pick: pick,
    ir.Merge: merge,
    ir.Elastic: elastic,
    ir.Update: update,
}
