"""wire: sends values in the wire dtype or block format, and adds them in the accumulation dtype.

It also lowers the divisors of means, which backends do not execute. They do not execute the hint `integers`
either: `packing.rewrite_flat` lowers it while it packs a collective for this pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from commplan.collectives.registry import algorithms
from commplan.ir.plan import Algorithm, Ref
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, LocalSum, Phase, Scale, Schedule
from commplan.ir.types import DType
from commplan.passes.base import Pass, PassContext
from commplan.passes.packing import rewrite_flat
from commplan.passes.rewrite import Editor, padded, round_up, trimmed
from commplan.passes.wire_ops import Wire, cast
from commplan.select.options import NATIVE, has_wire_options


class WirePass(Pass, frozen=True):
    """Sends in the wire type and accumulates in the declared one, whatever the backend would do."""

    name: ClassVar[str] = "wire"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket", "fuse_update", "decompose")

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        for phase in schedule.phases:
            phase_choices: list[Choice] = []
            yield rewrite_flat(schedule, phase, context.order, _is_rewritten, _rewrite, phase_choices)
            choices += _merge_choices(phase_choices)


def _is_rewritten(op: Collective) -> bool:
    """Whether the pass rewrites `op`."""
    return has_wire_options(op) or op.divisor > 1 or op.hints.integers is not None


def _rewrite(editor: Editor, op: Collective, padding_allowed: bool, choices: list[Choice]) -> None:
    """Emit the replacement of `op`.

    A mean is divided in the accumulation dtype, which can represent the sum. Shards of a sum are divided
    before they are gathered. In f16 the sum may overflow, so the terms are divided before they are sent.

    Args:
        editor: Receives the ops.
        op: A collective on a flat buffer.
        padding_allowed: Whether readers tolerate padding after the result.
        choices: Receives the decision if the dtypes differ from that of the operand.
    """
    dtype, ranks = editor.leaf(op.operand).dtype, editor.size(op.axes)
    adds = op.op == "sum" and ranks > 1
    sent, accumulate = op.hints.wire_types(dtype, adds=adds)
    in_blocks = ranks > 1 and dtype.is_float and op.op in (None, "sum")
    wire = Wire(sent, op.hints.codec if in_blocks else None)
    if op.divisor > 1 and op.hints.divides_first(dtype):
        op = replace(op, operand=_divide(editor, op, op.operand, f"{op.result}/divided"), divisor=1)
    # The collective that remains after the conversions and divisions.
    bare = replace(op, hints=op.hints.exact, divisor=1)
    if wire == (dtype, None) and (not adds or accumulate == sent):
        if op.divisor == 1:
            editor.ops.append(bare)
        else:
            _divide(editor, op, editor.move(bare, op.operand, f"{op.result}/sum"))
        return
    if not adds or (accumulate == sent and wire.codec is None):
        _convert_around(editor, op, bare, wire)
        why = "nothing is added" if not adds else f"sums are requested in {accumulate} too"
        choices.append(Choice("wire", f"`{op.result}`: {op.kind} in {wire}", why, op.span))
        return
    if op.kind == "reduce_scatter":
        _scatter(editor, op, bare, wire, accumulate)
    else:
        _sum(editor, op, bare, wire, accumulate, padding_allowed)
    text = f"`{op.result}`: sent in {wire}, added in {accumulate}"
    why = f"a backend's own {op.kind} of {wire} would add in {wire}"
    if wire.codec is not None:
        why = f"no backend adds values in {wire.codec.name}"
    if op.pinned and op.algorithm != NATIVE:
        moves = "the all-gather alone" if _gathers_by(op) != NATIVE and op.kind == "all_reduce" else "nothing"
        why += f"; `via {op.algorithm}` carries out {moves}, since it adds in the type that it sends"
    choices.append(Choice("wire", text, why, op.span, _alternatives(op.kind, dtype, wire, accumulate)))


def _alternatives(kind: str, dtype: DType, wire: Wire, accumulate: DType) -> tuple[str, ...]:
    """Descriptions of the rejected alternatives: one native collective in the wire dtype, or in `dtype`."""
    if wire.codec is not None:
        times = dtype.nbytes * wire.codec.block / wire.codec.nbytes(wire.codec.block)
        return (f"one {kind} that sends and adds in {dtype}: {times:.3g} x the bytes",)
    rejected = [f"one {kind} that sends and adds in {wire}: the sum must be in {accumulate}"]
    if dtype.nbytes > wire.dtype.nbytes:
        times = dtype.nbytes // wire.dtype.nbytes
        rejected.append(f"one {kind} that sends and adds in {dtype}: {times} x the bytes")
    return tuple(rejected)


def _merge_choices(choices: Sequence[Choice]) -> list[Choice]:
    """Merge choices that differ only in the result's name, as in "`g/b0` and 3 more: sent in bf16"."""
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        text = choice.what.partition(": ")[2]
        groups.setdefault((text, choice.why, choice.span, choice.rejected), []).append(choice)
    return [
        group[0]
        if len(group) == 1
        else replace(group[0], what=group[0].what.replace(": ", f" and {len(group) - 1} more: ", 1))
        for group in groups.values()
    ]


def _convert_around(editor: Editor, op: Collective, bare: Collective, wire: Wire) -> None:
    """Lower a collective that adds nothing, or adds in the wire dtype.

    y = broadcast(x)  -->  y = cast(broadcast(cast(x, wire)), dtype of x)
    y = broadcast(x)  -->  y = decode(broadcast(encode(x)))
    """
    source, size = editor.leaf(op.operand), editor.leaf(op.result).size
    narrow = wire.narrow(editor, op, op.operand, f"{op.result}/")
    moved = editor.move(bare, narrow, f"{op.result}/moved")
    if op.divisor > 1:
        moved = _divide(editor, op, moved, f"{op.result}/mean")
    wire.widen(editor, op, moved, source.dtype, None, size // source.size, size)


def _scatter(editor: Editor, op: Collective, bare: Collective, wire: Wire, accumulate: DType) -> None:
    """Lower a reduce-scatter.

    y = reduce_scatter(x)  -->  y = cast(local_sum(cast(all_to_all(cast(x, wire)), accumulate)))
    """
    dtype = editor.leaf(op.result).dtype
    name = None if accumulate == dtype else f"{op.result}/shard"
    total = _shard_sum(editor, op, bare, wire, accumulate, name)
    if name is not None:
        cast(editor, op, total, dtype, None)


def _sum(
    editor: Editor, op: Collective, bare: Collective, wire: Wire, accumulate: DType, padding_allowed: bool
) -> None:
    """Lower an all-reduce. The buffer is padded to whole shards, and shards to whole blocks.

    y = all_reduce(x)  -->  s = local_sum(cast(all_to_all(cast(x, wire)), accumulate));
                            y = cast(all_gather(cast(s, wire)))
    """
    dtype, before, ranks = editor.leaf(op.operand).dtype, editor.leaf(op.operand).size, editor.size(op.axes)
    size = round_up(before, ranks * (wire.codec.block if wire.codec else 1))
    bare = replace(bare, operand=padded(editor, op.operand, size))
    total = _shard_sum(editor, op, bare, wire, accumulate, f"{op.result}/shard")
    narrow = wire.narrow(editor, op, total, f"{op.result}/shard_")
    gathers_by = _gathers_by(op)
    gathered = editor.move(
        bare, narrow, f"{op.result}/gathered", kind="all_gather", op=None, algorithm=gathers_by
    )
    name = None if size == before or padding_allowed else f"{op.result}/padded"
    received = wire.widen(editor, op, gathered, dtype, name, ranks, size)
    if name is not None:
        trimmed(editor, received, op)


def _gathers_by(op: Collective) -> Algorithm:
    """The algorithm of the all-gather: that of the plan if it supports all-gathers, else `native`."""
    return op.algorithm if op.pinned and op.algorithm.name in algorithms("all_gather") else NATIVE


def _shard_sum(
    editor: Editor, op: Collective, bare: Collective, wire: Wire, accumulate: DType, name: Ref | None
) -> Ref:
    """Emit this rank's shard of the sum or mean, in dtype `accumulate`.

    Args:
        editor: Receives the ops.
        op: The collective that is lowered.
        bare: `op` without wire options and divisor, on a buffer of whole shards.
        wire: The form of the values that are sent.
        accumulate: The dtype of the sum.
        name: The name of the shard, made unique; None if it is the result of `op`.

    Returns:
        The shard.
    """
    ranks, size = editor.size(op.axes), editor.leaf(bare.operand).size
    narrow = wire.narrow(editor, op, bare.operand, f"{op.result}/", ranks)
    swapped = editor.move(bare, narrow, f"{op.result}/swapped", kind="all_to_all", op=None, algorithm=NATIVE)
    wide = wire.widen(editor, op, swapped, accumulate, f"{op.result}/{accumulate}", ranks, size)
    total = LocalSum(op.result, wide, ranks, op.span)
    if op.divisor == 1:
        return editor.emit(total, name)
    return _divide(editor, op, editor.emit(total, f"{op.result}/sum"), name)


def _divide(editor: Editor, op: Collective, operand: Ref, name: Ref | None = None) -> Ref:
    """Divide `operand` by the divisor of `op`. If `name` is None, the quotient is the result of `op`."""
    return editor.emit(Scale(op.result, operand, "div", float(op.divisor), op.span), name)
