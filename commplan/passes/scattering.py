"""Reduce-scatters and all-gathers over several axes, one axis after another."""

from __future__ import annotations

from commplan.ir.schedule import Collective, Op
from commplan.passes.rewrite import Editor, network_lane


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
    steps = op.algorithm.levels if op.kind == "reduce_scatter" else op.algorithm.levels[::-1]
    current = op.operand
    for index, (axis, algorithm) in enumerate(steps):
        name = None if index == len(steps) - 1 else f"{op.result}/{op.kind}_{axis}"
        current = editor.move(
            ops, op, current, name, axes=(axis,), algorithm=algorithm,
            lane=network_lane(editor.schedule.axes, (axis,)),
            pinned=any(arg.key == axis for arg in op.algorithm.args),
        )  # fmt: skip
    return ", ".join(f"{op.kind} {axis}" for axis, _ in steps)
