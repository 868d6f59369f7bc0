"""wire: values travel in the wire type and are added in the declared one."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from commplan.ir.choice import Choice
from commplan.ir.plan import Algorithm, Ref
from commplan.ir.schedule import Cast, Collective, CollectiveKind, LocalSum, Op, Schedule
from commplan.ir.types import DType, Placement
from commplan.passes.base import Context, Pass
from commplan.passes.candidates import travels_narrow
from commplan.passes.flat import rewrite_flat
from commplan.passes.rewrite import Editor, axis_names, padded, round_up, trimmed, varying

NATIVE = Algorithm("native")


class WirePass(Pass, frozen=True):
    """Sends in the wire type and accumulates in the declared one, whatever the backend would do."""

    name: ClassVar[str] = "wire"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket", "fuse_update", "decompose")

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        choices: list[Choice] = []
        phases = tuple(
            rewrite_flat(schedule, phase, context.order, travels_narrow, _rewrite, choices)
            for phase in schedule.phases
        )
        return msgspec.structs.replace(schedule, phases=phases, choices=(*schedule.choices, *choices))


def _rewrite(editor: Editor, ops: list[Op], op: Collective, loose: bool, choices: list[Choice]) -> None:
    """Append to `ops` what `op` becomes. `loose`: its readers do not mind padding behind the result."""
    dtype = editor.leaf(op.operand).dtype
    wire, accumulate = op.hints.wire_types(dtype)
    bare = msgspec.structs.replace(op, hints=msgspec.structs.replace(op.hints, wire=None, accumulate=None))
    adds = op.op == "sum"
    if wire == dtype and (not adds or accumulate == wire):
        ops.append(bare)
        return
    if not adds or accumulate == wire:
        _cast_around(editor, ops, bare, wire)
        why = "nothing is added" if not adds else f"sums are wanted in {accumulate} too"
        choices.append(Choice("wire", f"`{op.result}`: {op.kind} in {wire}", why, op.span))
        return
    if op.kind == "reduce_scatter":
        _scatter(editor, ops, bare, wire, accumulate)
    else:
        _sum(editor, ops, bare, wire, accumulate, loose)
    choices.append(
        Choice(
            "wire",
            f"`{op.result}`: sent in {wire}, added in {accumulate}",
            f"a backend's own {op.kind} of {wire} would add in {wire}",
            op.span,
            (
                f"{op.kind} in {wire}: it would add in {wire}",
                f"{op.kind} in {dtype}: more bytes or a narrower sum",
            ),
        )
    )


def _cast_around(editor: Editor, ops: list[Op], op: Collective, wire: DType) -> None:
    """y = broadcast(x)  -->  y = cast(broadcast(cast(x, wire)), dtype of x)"""
    dtype, result = editor.leaf(op.operand).dtype, editor.values[op.result]
    narrow = _cast(editor, ops, op, op.operand, wire, f"{op.result}/{wire}")
    moved = editor.flat(f"{op.result}/moved", result.leaves[0].size, wire, result.placement)
    ops.append(_moving(editor, op, op.kind, narrow, moved, op.op))
    _cast(editor, ops, op, moved, dtype, op.result)


def _scatter(editor: Editor, ops: list[Op], op: Collective, wire: DType, accumulate: DType) -> None:
    """y = reduce_scatter(x)  -->  y = cast(local_sum(cast(all_to_all(cast(x, wire)), accumulate)))"""
    result = editor.values[op.result]
    total = _shard_sum(editor, ops, op, op.operand, wire, accumulate, result.placement)
    if accumulate != result.leaves[0].dtype:
        _cast(editor, ops, op, total, result.leaves[0].dtype, op.result)


def _sum(editor: Editor, ops: list[Op], op: Collective, wire: DType, accumulate: DType, loose: bool) -> None:
    """y = all_reduce(x)  -->  s = local_sum(cast(all_to_all(cast(x, wire)), accumulate));
    y = cast(all_gather(cast(s, wire)))

    The buffer is padded to whole shards.
    """
    dtype, placement = editor.leaf(op.operand).dtype, editor.values[op.result].placement
    ranks, before = editor.size(op.axes), editor.leaf(op.operand).size
    size = round_up(before, ranks)
    operand = padded(editor, ops, op.operand, size)
    own = varying(editor.values[operand].placement, op.axes, axis_names(editor.schedule))
    total = _shard_sum(editor, ops, op, operand, wire, accumulate, own)
    narrow = _cast(editor, ops, op, total, wire, f"{op.result}/shard_{wire}")
    gathered = editor.flat(f"{op.result}/gathered", size, wire, placement)
    ops.append(_moving(editor, op, "all_gather", narrow, gathered, None))
    if size == before or loose:
        editor.values.pop(op.result)
        _cast(editor, ops, op, gathered, dtype, op.result)
        return
    wide = _cast(editor, ops, op, gathered, dtype, f"{op.result}/padded")
    trimmed(editor, ops, wide, op.result, op)


def _shard_sum(
    editor: Editor,
    ops: list[Op],
    op: Collective,
    operand: Ref,
    wire: DType,
    accumulate: DType,
    own: Placement,
) -> Ref:
    """This rank's shard of the sum, in `accumulate`; `own` is how shards lie.

    Where that is already the result of `op`, it gets its name.
    """
    size, ranks = editor.leaf(operand).size, editor.size(op.axes)
    narrow = _cast(editor, ops, op, operand, wire, f"{op.result}/{wire}")
    swapped = editor.flat(f"{op.result}/swapped", size, wire, own)
    ops.append(_moving(editor, op, "all_to_all", narrow, swapped, None))
    wide = _cast(editor, ops, op, swapped, accumulate, f"{op.result}/{accumulate}")
    done = op.kind == "reduce_scatter" and accumulate == editor.leaf(op.result).dtype
    total = op.result if done else editor.flat(f"{op.result}/shard", size // ranks, accumulate, own)
    ops.append(LocalSum(total, wide, ranks, op.span))
    return total


def _moving(
    editor: Editor, op: Collective, kind: CollectiveKind, operand: Ref, result: Ref, how: str | None
) -> Collective:
    leaf = editor.leaf(operand)
    kept = kind == op.kind
    return msgspec.structs.replace(
        op, kind=kind, operand=operand, result=result, dtype=leaf.dtype, nbytes=leaf.nbytes, op=how, after=(),
        root=op.root if kept else None, algorithm=op.algorithm if kept else NATIVE,
    )  # fmt: skip


def _cast(editor: Editor, ops: list[Op], op: Collective, operand: Ref, dtype: DType, name: Ref) -> Ref:
    """`operand` in `dtype`, called `name`; nothing to do where it is so already and `name` is free."""
    value = editor.values[operand]
    if value.leaves[0].dtype == dtype and name != op.result:
        return operand
    leaves = (msgspec.structs.replace(value.leaves[0], dtype=dtype),)
    made = editor.fresh(name) if name != op.result else name
    placement = value.placement
    if name in editor.values and name == op.result:
        placement = editor.values[name].placement
    editor.add(msgspec.structs.replace(value, id=made, leaves=leaves, placement=placement))
    ops.append(Cast(made, operand, dtype, op.span))
    return made
