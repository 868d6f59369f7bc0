"""What each op of a schedule means, for all ranks at once.

A clear definition, not a fast one: loops over ranks, and sums in rank order in the dtype of the
operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from commplan.collectives.registry import scalar_algorithm
from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.lowering.oracle.layout import Grid, Held, Rank, cut, join, pad_rows
from commplan.lowering.oracle.numbers import Array, combine, convert, divide, multiply, storage
from commplan.lowering.oracle.programs import execute
from commplan.lowering.programs import program_of

Values = Mapping[str, ir.Value]
Env = Mapping[str, Held]


def pack(op: ir.Pack, values: Values, env: Env, grid: Grid) -> Held:
    """`ways` rows; in each, the runs of columns that the parts name. Zero where no part lies."""
    leaf = values[op.result].leaves[0]
    held: Held = {}
    for rank in grid.ranks:
        buffer = np.zeros(leaf.size, storage(leaf.dtype)).reshape(op.ways, -1)
        for part in op.parts:
            rows = _rows(env[part.value][rank][part.leaf], op.ways, values[part.value])
            buffer[:, part.offset : part.offset + part.size] = rows[:, part.start : part.start + part.size]
        held[rank] = (buffer.reshape(-1),)
    return held


def _rows(array: Array, ways: int, value: ir.Value) -> Array:
    """A leaf as `ways` rows: flattened and padded; an array's leading dimension is padded instead."""
    if value.kind == "array" and array.ndim:
        array = pad_rows(array, ways)
    return pad_rows(array.reshape(-1), ways).reshape(ways, -1)


def unpack(op: ir.Unpack, values: Values, env: Env, grid: Grid) -> Held:
    """Leaves from the runs of columns of buffers: padding dropped, shapes restored."""
    value = values[op.result]
    held: Held = {}
    for rank in grid.ranks:
        mine: list[Array] = []
        for number, leaf in enumerate(value.leaves):
            width = _rows(np.zeros(leaf.shape, np.bool_), op.ways, value).shape[1]
            rows = np.zeros((op.ways, width), storage(leaf.dtype))
            for part in op.parts:
                if part.leaf == number:
                    buffer = env[part.value][rank][0].reshape(op.ways, -1)
                    rows[:, part.start : part.start + part.size] = buffer[
                        :, part.offset : part.offset + part.size
                    ]
            mine.append(rows.reshape(-1)[: leaf.size].reshape(leaf.shape))
        held[rank] = tuple(mine)
    return held


def cast(op: ir.Cast, values: Values, env: Env, grid: Grid) -> Held:
    """Every leaf converted to `op.dtype`, rounded to nearest even where that is narrower."""
    del values
    return {rank: tuple(convert(leaf, op.dtype) for leaf in env[op.operand][rank]) for rank in grid.ranks}


def local_sum(op: ir.LocalSum, values: Values, env: Env, grid: Grid) -> Held:
    """The `ways` rows of a flat buffer, added from first to last."""
    dtype = values[op.operand].leaves[0].dtype
    held: Held = {}
    for rank in grid.ranks:
        rows = env[op.operand][rank][0].reshape(op.ways, -1)
        held[rank] = (_fold("sum", list(rows), dtype),)
    return held


def scale(op: ir.Scale, values: Values, env: Env, grid: Grid) -> Held:
    """Every leaf times or divided by a number, or by each rank's own scalar; in the leaf's dtype."""
    change = multiply if op.how == "mul" else divide
    leaves = values[op.operand].leaves
    held: Held = {}
    for rank in grid.ranks:
        by = env[op.by][rank][0] if isinstance(op.by, str) else op.by
        held[rank] = tuple(
            change(array, by, leaf.dtype) for leaf, array in zip(leaves, env[op.operand][rank], strict=True)
        )
    return held


def slice_(op: ir.Slice, values: Values, env: Env, grid: Grid) -> Held:
    """Each rank keeps the cut that its place along the axes names (see `layout.cut`)."""
    tree = values[op.operand].kind == "tree"
    ways = len(op.owners) or grid.size(op.axes)
    held: Held = {}
    for rank in grid.ranks:
        place = grid.position(rank, op.axes)
        if op.owners:
            place = op.owners.index(place) if place in op.owners else 0
        held[rank] = tuple(cut(leaf, ways, place, tree=tree) for leaf in env[op.operand][rank])
    return held


def elastic(op: ir.Elastic, values: Values, env: Env, grid: Grid) -> Held:
    """pull = eta rho (W - C), the pull towards the centre of Zhang, Choromanska and LeCun (2015)."""
    leaves = values[op.operand].leaves
    held: Held = {}
    for rank in grid.ranks:
        eta, rho = (env[x][rank][0] if isinstance(x, str) else x for x in (op.eta, op.rho))
        pulls: list[Array] = []
        for leaf, own, center in zip(leaves, env[op.operand][rank], env[op.center][rank], strict=True):
            factor = multiply(convert(eta, leaf.dtype), rho, leaf.dtype)
            pulls.append(multiply(convert(np.subtract(own, center), leaf.dtype), factor, leaf.dtype))
        held[rank] = tuple(pulls)
    return held


def update(op: ir.Update, values: Values, env: Env, grid: Grid) -> Held:
    """The new centre: operand + delta, leaf by leaf, rounded once to the leaf's dtype."""
    leaves = values[op.operand].leaves
    return {
        rank: tuple(
            combine("sum", own, delta, leaf.dtype)
            for leaf, own, delta in zip(leaves, env[op.operand][rank], env[op.delta][rank], strict=True)
        )
        for rank in grid.ranks
    }


def collective(op: ir.Collective, values: Values, env: Env, grid: Grid) -> Held:
    """Leaf by leaf within each group of ranks.

    Where a chunk program carries it out, sums are made in its order; elsewhere in the order of the ranks.
    """
    source, target = values[op.operand], values[op.result]
    held: dict[Rank, list[Array]] = {rank: [] for rank in grid.ranks}
    for group in grid.groups(op.axes):
        for number, leaf in enumerate(source.leaves):
            arrays = [env[op.operand][rank][number] for rank in group]
            results = _exchange(op, arrays, leaf, target.leaves[number], grid, tree=source.kind == "tree")
            for rank, result in zip(group, results, strict=True):
                held[rank].append(result)
    return {rank: tuple(leaves) for rank, leaves in held.items()}


def _exchange(
    op: ir.Collective, arrays: list[Array], leaf: ir.Leaf, target: ir.Leaf, grid: Grid, *, tree: bool
) -> list[Array]:
    """One leaf of every rank of a group, in rank order, before and after the collective."""
    if op.kind == "all_gather" and not leaf.shape:  # a scalar of a split tree was never cut
        return [join(arrays, target)] * len(arrays)
    if op.kind == "reduce_scatter" and not leaf.shape:
        op = msgspec.structs.replace(op, kind="all_reduce", algorithm=scalar_algorithm(op.algorithm))
    flat = _flat(op, arrays, tree=tree)
    whole = len(flat[0]) * leaf.dtype.nbytes * (len(arrays) if op.kind == "all_gather" else 1)
    program = program_of(op, grid.sizes, grid.spreads, whole, grid.file)
    if program is not None and leaf.size:
        held = execute(program, flat, op.op or "sum", leaf.dtype)
        if op.kind == "reduce":
            held = _at(op.root or 0, held)
        return [each[: target.size].reshape(target.shape) for each in held]
    ways = len(arrays)
    match op.kind:
        case "all_reduce":
            return [_fold(op.op, arrays, leaf.dtype)] * ways
        case "reduce_scatter":
            total = _fold(op.op, arrays, leaf.dtype)
            return [cut(total, ways, place, tree=tree) for place in range(ways)]
        case "all_gather":
            return [join(arrays, target)] * ways
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
    """What goes into a collective, one-dimensional; padded where it is cut."""
    if op.kind != "reduce_scatter":
        return [array.reshape(-1) for array in arrays]
    rows = [array.reshape(-1) if tree else array for array in arrays]
    return [pad_rows(each, len(arrays)).reshape(-1) for each in rows]


def _fold(op: str | None, arrays: Sequence[Array], dtype: DType) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        match op:
            case "max" | "min":
                total = combine(op, total, array, dtype)
            case _:
                total = combine("sum", total, array, dtype)
    return total


OPS: Mapping[type[ir.Op], Callable[[Any, Values, Env, Grid], Held]] = {
    ir.Pack: pack,
    ir.Unpack: unpack,
    ir.Cast: cast,
    ir.Collective: collective,
    ir.LocalSum: local_sum,
    ir.Scale: scale,
    ir.Slice: slice_,
    ir.Elastic: elastic,
    ir.Update: update,
}
