"""Adapts the consequences of an edit: order, types, placements, bytes, roots and levels.

A compiler with a bug would adapt the rest, so the meaning of the schedule is wrong and not its form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from commplan.ir import schedule as ir
from commplan.ir.plan import Algorithm
from commplan.ir.shard_shapes import cut_all
from commplan.ir.types import Placement

REDUCES, ROOTED = ("all_reduce", "reduce_scatter", "reduce"), ("broadcast", "reduce", "shift")
Repair = Literal["", "types", "placements"]  # as it is; as the rules want it; as it really is


def repaired(schedule: ir.Schedule, how: Repair, sound: ir.Schedule) -> ir.Schedule:
    """`schedule`, an edit of `sound`, with ops in a valid order and matching roots, operations, bytes and
    levels.

    `how` selects the repairs; declared leaves always follow. `types`: the placements that the rules of the
    ops require. `placements`: the actual placements. Empty: no repair.
    """
    if not how:
        return schedule
    before = {phase.name: phase for phase in sound.phases}
    phases = tuple(
        _repaired(schedule, ordered(phase), how, before.get(phase.name, phase)) for phase in schedule.phases
    )
    return replace(schedule, phases=phases)


def _repaired(schedule: ir.Schedule, phase: ir.Phase, how: Repair, before: ir.Phase) -> ir.Phase:
    sizes = {axis.name: axis.size for axis in schedule.axes}
    values = {value.id: value for value in (*schedule.entry, *phase.values)}
    entering = {value.id for value in schedule.entry}
    value_of = {value.id: value for value in (*schedule.entry, *before.values)}
    ops: list[ir.Op] = []
    for edited in phase.ops:
        op, refs = edited, (*ir.operands(edited), *ir.results(edited))
        if op in before.ops and all(values.get(ref) == value_of.get(ref) for ref in refs):
            ops.append(op)
            continue
        try:
            op = _fitted(edited, values, sizes)
            for ref in ir.results(op):
                if ref not in entering:
                    values[ref] = follows(op, values[ref], values, sizes, how)
            if isinstance(op, ir.Collective) and (how == "types" or values[op.operand].kind == "flat"):
                _as_wanted(op, values, entering)
        except (KeyError, IndexError, ZeroDivisionError, ValueError):  # no repair makes sense of it
            pass
        ops.append(op)
    return replace(phase, ops=tuple(ops), values=tuple(values[value.id] for value in phase.values))


def ordered(phase: ir.Phase) -> ir.Phase:
    """`phase` with every op after its operands, if possible; otherwise unchanged."""
    makers = {ref: at for at, op in enumerate(phase.ops) for ref in ir.results(op)}
    needs = [{makers[ref] for ref in (*ir.operands(op), *op.after) if ref in makers} for op in phase.ops]
    pending, done = list(range(len(phase.ops))), list[int]()
    while pending:
        ready = next((at for at in pending if needs[at].issubset(done)), None)
        if ready is None:
            return phase
        pending.remove(ready)
        done.append(ready)
    return replace(phase, ops=tuple(phase.ops[at] for at in done))


def _as_wanted(op: ir.Collective, values: dict[str, ir.Value], entering: set[str]) -> None:
    """The placements that a collective's kind and axes require: the operand differs over its axes, the result
    as the kind defines."""
    is_split = op.kind in ("reduce_scatter", "all_to_all", "reduce", "shift", "swap")
    for ref, varies in ((op.operand, True), (op.result, is_split)):
        placement = values[ref].placement
        if ref in entering:
            continue
        if varies:
            missing = tuple(axis for axis in op.axes if not placement.varies(axis))
            placement = replace(placement, per=(*placement.per, *missing))
        else:
            placement = placement.same_over(op.axes)
        values[ref] = replace(values[ref], placement=placement)


def _ways(axes: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _fitted(op: ir.Op, values: dict[str, ir.Value], sizes: dict[str, int]) -> ir.Op:
    """A collective as its kind, axes and operand want it."""
    if not isinstance(op, ir.Collective):
        return op
    operand, ways = values[op.operand], _ways(op.axes, sizes)
    root = min(op.root or 0, ways - 1) if op.kind in ROOTED else None
    reduces = (op.op or "sum") if op.kind in REDUCES else None
    algorithm = op.algorithm
    if {name for name, _ in algorithm.levels} & set(sizes) and {n for n, _ in algorithm.levels} != set(
        op.axes
    ):
        args = tuple(arg for arg in algorithm.args if (arg.key or arg.value) in op.axes)
        whole = len(args) == len(op.axes) > 1
        algorithm = replace(algorithm, args=args) if whole else Algorithm("native")
    if op.kind == "all_to_all":
        algorithm = Algorithm("native")
    return replace(
        op, root=root, op=reduces, algorithm=algorithm, nbytes=operand.nbytes, dtype=ir.widest(operand.leaves)
    )


def follows(
    op: ir.Op, result: ir.Value, values: dict[str, ir.Value], sizes: dict[str, int], how: Repair
) -> ir.Value:
    """The result of `op` for its operands, in place of `result`."""
    if isinstance(op, ir.Map | ir.Read | ir.Exchange | ir.Unpack) or not ir.operands(op):
        return _retyped(op, result, values)
    operand = values[ir.operands(op)[0]]
    leaves, whole, placement = operand.leaves, operand.whole, operand.placement
    match op:
        case ir.Pack():
            size = max([result.leaves[0].size // op.ways, *(part.offset + part.size for part in op.parts)])
            dtype = operand.leaves[op.parts[0].leaf].dtype
            return replace(result, leaves=(ir.Leaf("", (size * op.ways,), dtype),))
        case ir.Cast():
            cast = operand.of_types(op.types(leaves))
            leaves, whole = cast.leaves, cast.whole
        case ir.LocalSum():
            leaves = (replace(leaves[0], shape=(leaves[0].size // op.ways,)),)
            placement = replace(placement, per=())
        case ir.Slice():
            whole = whole or leaves
            leaves = cut_all(operand.kind, leaves, [len(op.owners) or _ways(op.axes, sizes)])
            placement = replace(placement, split=(*placement.split, *op.axes))
        case ir.Collective():
            leaves, placement = _collected(op, operand, result, sizes)
            whole = result.whole
        case _:
            pass
    placement = replace(placement, server=result.placement.server)
    if how == "placements" and operand.kind != "flat" and not isinstance(op, ir.Put | ir.Get):
        return replace(result, leaves=leaves, whole=whole if placement.split else (), placement=placement)
    return replace(result, leaves=leaves)


def _retyped(op: ir.Op, result: ir.Value, values: dict[str, ir.Value]) -> ir.Value:
    """The types of unpacked leaves are those of the buffers."""
    if not isinstance(op, ir.Unpack) or not op.parts:
        return result
    leaves = list(result.leaves)
    for part in op.parts:
        leaves[part.leaf] = replace(leaves[part.leaf], dtype=values[part.value].leaves[0].dtype)
    return replace(result, leaves=tuple(leaves))


def _collected(
    op: ir.Collective, operand: ir.Value, result: ir.Value, sizes: dict[str, int]
) -> tuple[tuple[ir.Leaf, ...], Placement]:
    ways, flat, leaves = _ways(op.axes, sizes), operand.kind == "flat", operand.leaves
    placement = operand.placement.same_over(op.axes)
    if op.kind == "reduce_scatter":
        placement = replace(placement, split=(*placement.split, *op.axes))
        cut = (replace(leaves[0], shape=(leaves[0].size // ways,)),)
        return cut if flat else cut_all(operand.kind, leaves, [ways]), placement
    if op.kind == "all_gather":
        placement = replace(placement, split=tuple(a for a in placement.split if a not in op.axes))
        gathered = (replace(leaves[0], shape=(leaves[0].size * ways,)),)
        return gathered if flat else tuple(
            replace(leaf, dtype=source.dtype) for leaf, source in zip(result.leaves, leaves, strict=True)
        ), placement  # fmt: skip
    return leaves, operand.placement if op.kind in ("all_to_all", "reduce", "shift", "swap") else placement
