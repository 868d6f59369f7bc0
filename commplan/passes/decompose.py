"""decompose: flat or hierarchical; and a hierarchical collective becomes one collective for each level."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from commplan.ir.axes import coordinates
from commplan.ir.choice import Choice
from commplan.ir.plan import Algorithm, Ref
from commplan.ir.schedule import Collective, CollectiveKind, Op, Schedule
from commplan.passes import scattering
from commplan.passes.base import Context, Pass
from commplan.passes.candidates import as_one, travels_narrow
from commplan.passes.choosing import Chooser
from commplan.passes.flat import rewrite_flat
from commplan.passes.layering import layered
from commplan.passes.rewrite import Editor, network_lane, padded, round_up, trimmed

Levels = tuple[tuple[str, Algorithm], ...]  # axis and algorithm, innermost first


class DecomposePass(Pass, frozen=True):
    """Decides between flat and hierarchical, and carries hierarchies out level by level."""

    name: ClassVar[str] = "decompose"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket", "fuse_update")

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        choices: list[Choice] = []
        chooser = Chooser(schedule, context)

        def apart(op: Collective) -> bool:
            return bool(op.algorithm.levels) and not _stays(op, schedule)

        phases = tuple(
            rewrite_flat(schedule, layered(chooser, phase, choices), context.order, apart, _expand, choices)
            for phase in schedule.phases
        )
        return msgspec.structs.replace(schedule, phases=phases, choices=(*schedule.choices, *choices))


def _stays(op: Collective, schedule: Schedule) -> bool:
    """Whether a hierarchy stays one operation. One of a single level becomes its algorithm."""
    if op.kind == "reduce" or (len(op.axes) > 1 and scattering.stays(op)):
        return True
    return len(op.algorithm.levels) > 1 and as_one(op.kind, op.algorithm, schedule.backend, op)


def _expand(editor: Editor, ops: list[Op], op: Collective, loose: bool, choices: list[Choice]) -> None:
    """Append to `ops` what `op` becomes. `loose`: its readers do not mind padding behind the result."""
    steps = op.algorithm.levels
    if len(steps) == 1:
        named = op.algorithm.args[0].key is not None
        ops.append(msgspec.structs.replace(op, algorithm=steps[0][1], pinned=named))
        return
    if scattering.by_axis(op):
        what = scattering.one_by_one(editor, ops, op)
    elif op.kind == "broadcast":
        what = _broadcast(editor, ops, op, steps)
    elif op.op == "sum":
        what = _sum(editor, ops, op, steps, loose)
    else:
        what = _one_by_one(editor, ops, op, steps)
    if op.pinned:
        why = f"the plan says via {op.algorithm}"
        choices.append(Choice("decompose", f"`{op.result}`: {what}", why, op.span))


def _sum(editor: Editor, ops: list[Op], op: Collective, steps: Levels, loose: bool) -> str:
    """all_reduce(gpu, node)  -->  reduce_scatter(gpu); all_reduce(node); all_gather(gpu)

    The buffer is padded to whole shards. Each level outside moves a part of the bytes.
    """
    inner, (outer, outermost) = steps[:-1], steps[-1]
    multiple = math.prod(editor.size((axis,)) for axis, _ in (steps if travels_narrow(op) else inner))
    size = round_up(editor.leaf(op.operand).size, multiple)
    grown = size != editor.leaf(op.operand).size
    current = padded(editor, ops, op.operand, size)
    for axis, algorithm in inner:
        current = _step(editor, ops, op, current, axis, algorithm, "reduce_scatter")
    current = _step(editor, ops, op, current, outer, outermost, "all_reduce")
    for index in range(len(inner) - 1, -1, -1):
        direct = index == 0 and (loose or not grown)
        current = _step(editor, ops, op, current, *inner[index], "all_gather", last=direct)
    if current != op.result:
        trimmed(editor, ops, current, op)
    return ", ".join(
        [f"reduce_scatter {axis}" for axis, _ in inner]
        + [f"all_reduce {outer}"]
        + [f"all_gather {axis}" for axis, _ in inner[::-1]]
    )


def _one_by_one(editor: Editor, ops: list[Op], op: Collective, steps: Levels) -> str:
    """all_reduce max(gpu, node)  -->  all_reduce max(gpu); all_reduce max(node)

    No backend scatters a maximum, so every level moves all the bytes.
    """
    current = op.operand
    for index, (axis, algorithm) in enumerate(steps):
        last = index == len(steps) - 1
        current = _step(editor, ops, op, current, axis, algorithm, op.kind, last=last)
    return ", ".join(f"all_reduce {axis}" for axis, _ in steps)


def _broadcast(editor: Editor, ops: list[Op], op: Collective, steps: Levels) -> str:
    """broadcast(node, gpu) from r  -->  broadcast(node) from r's node; broadcast(gpu) from r's place

    Outermost first: after it every group inside has a rank that knows.
    """
    place = coordinates(op.root or 0, op.axes, editor.schedule.mesh_sizes)
    current = op.operand
    outside_in = steps[::-1]
    for index, (axis, algorithm) in enumerate(outside_in):
        last = index == len(outside_in) - 1
        current = _step(editor, ops, op, current, axis, algorithm, op.kind, last=last, root=place[axis])
    return ", ".join(f"broadcast {axis} from {place[axis]}" for axis, _ in outside_in)


def _step(
    editor: Editor,
    ops: list[Op],
    op: Collective,
    operand: Ref,
    axis: str,
    algorithm: Algorithm,
    kind: CollectiveKind,
    *,
    last: bool = False,
    root: int | None = None,
) -> Ref:
    """One level of `op`: a collective of `kind` over `axis`; the `last` one makes its result."""
    return editor.move(
        ops, op, operand, None if last else f"{op.result}/{kind}_{axis}", kind=kind, axes=(axis,), root=root,
        op=op.op if kind in ("all_reduce", "reduce_scatter") else None, algorithm=algorithm, form=None,
        lane=network_lane(editor.schedule.axes, (axis,)),
        pinned=any(arg.key == axis for arg in op.algorithm.args),
    )  # fmt: skip
