"""Reduce-scatters and all-gathers over several axes, one axis after another."""

from __future__ import annotations

import msgspec

from commplan.ir.schedule import Collective, Op
from commplan.ir.types import Placement
from commplan.passes.rewrite import Editor, axis_names, network_lane, varying


def by_axis(op: Collective) -> bool:
    """Whether `op` cuts or joins, in levels that are its axes in their order: the first named is innermost,
    so that what one level leaves is one run of the buffer."""
    keys = tuple(key for key, _ in op.algorithm.levels)
    return op.kind in ("reduce_scatter", "all_gather") and keys == op.axes


def stays(op: Collective) -> bool:
    """Whether `op` cuts or joins in levels of which one would leave pieces all over the buffer."""
    return op.kind in ("reduce_scatter", "all_gather") and not by_axis(op)


def one_by_one(editor: Editor, ops: list[Op], op: Collective) -> str:
    """reduce_scatter(gpu, node)  -->  reduce_scatter(gpu); reduce_scatter(node)
    all_gather(gpu, node)      -->  all_gather(node); all_gather(gpu)

    Each level outside moves a part of the bytes.
    """
    scatters = op.kind == "reduce_scatter"
    steps = op.algorithm.levels if scatters else op.algorithm.levels[::-1]
    current = op.operand
    for index, (axis, algorithm) in enumerate(steps):
        leaf, ways = editor.leaf(current), editor.size((axis,))
        before = editor.values[current].placement
        if scatters:
            size, after = leaf.size // ways, varying(before, (axis,), axis_names(editor.schedule))
        else:
            size, after = leaf.size * ways, _joined(before, axis)
        last = index == len(steps) - 1
        name = op.result if last else editor.flat(f"{op.result}/{op.kind}_{axis}", size, leaf.dtype, after)
        ops.append(
            msgspec.structs.replace(
                op, result=name, operand=current, axes=(axis,), nbytes=leaf.nbytes, algorithm=algorithm,
                after=(), lane=network_lane(editor.schedule.axes, (axis,)),
                pinned=any(arg.key == axis for arg in op.algorithm.args),
            )
        )  # fmt: skip
        current = name
    return ", ".join(f"{op.kind} {axis}" for axis, _ in steps)


def _joined(placement: Placement, axis: str) -> Placement:
    """`placement` when what ranks along `axis` hold has been brought together."""
    split = tuple(one for one in placement.split if one != axis)
    return msgspec.structs.replace(placement.same_over((axis,)), split=split)
