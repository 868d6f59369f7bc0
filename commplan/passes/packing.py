"""Replaces collectives on trees and arrays by collectives on flat buffers.

A buffer contains leaves of one dtype, or a run of one very large leaf. Scalars have no shard: a
reduce-scatter all-reduces them, and an all-gather passes them through. The pass `bucket` packs leaves into
buckets, and `decompose` and `wire` pack the collectives that they rewrite (`rewrite_flat`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from commplan.collectives.registry import scalar_algorithm
from commplan.diagnostics import fail
from commplan.ir.collective_kinds import MAKES_BLOCKS, TAKES_BLOCKS
from commplan.ir.plan import Algorithm, Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Part, Phase, Schedule, Value
from commplan.ir.shard_shapes import row_size
from commplan.passes.bin_packing import MOST, LeafBucket, LeafCollective, LeafSlice, fill, pieces
from commplan.passes.rewrite import Editor, laid_out, read_by_parts, unpack

# By the name of an input: the paths of all its leaves in the order of the backward pass.
Order = Mapping[str, Sequence[str]]
# Emits the replacement of a collective on a flat buffer. The flag is whether the result may be padded at its
# end, because all readers select parts of it. The list receives the decisions.
Rewrite = Callable[[Editor, Collective, bool, list[Choice]], None]


def pack_collectives(
    editor: Editor, group: Sequence[Collective], items: Sequence[LeafSlice], limit: int | None
) -> list[LeafBucket]:
    """Emit the ops that replace a group of collectives.

        y = all_reduce(x)  -->  b0 = pack(x..); r0 = all_reduce(b0); ..; y = unpack(r0..)

    Args:
        editor: Receives the ops.
        group: Collectives with equal kind, axes, op and placement.
        items: Their leaves, from `items_of`.
        limit: Maximum bytes of one rank's operand buffer; None for no limit. A larger leaf gets separate
            buffers (see `fill`).

    Returns:
        The buckets, one for each buffer.

    Raises:
        CommplanError: CP0724 if leaves would be split into more than `MOST` pieces.
    """
    stages = tuple(dict.fromkeys(stage for op in group for stage in op.stages))
    merged = replace(group[0], stages=stages)
    _check_count(items, limit, merged, editor.schedule.file)
    buckets = fill(items, limit)
    parts: dict[Ref, list[Part]] = {op.result: [] for op in group}
    for number, bucket in enumerate(buckets):
        runs = laid_out(Part(item.value, item.leaf, start, size, 0) for item, start, size in bucket.runs)
        buffer = _emit(editor, merged, bucket, runs, f"{merged.result}/b{number}")
        for (item, _, _), run in zip(bucket.runs, runs, strict=True):
            parts[item.result].append(replace(run, value=buffer))
    ways = editor.size(merged.axes) if merged.kind in MAKES_BLOCKS else 1
    editor.ops += [unpack(op.result, parts[op.result], op.span, op.operand, ways) for op in group]
    return buckets


def items_of(editor: Editor, group: Sequence[Collective], order: Order) -> list[LeafSlice]:
    """The leaves of all operands, each operand in order of readiness. Leaves without elements are omitted.

    Raises:
        CommplanError: CP0711 as `readiness`.
    """
    items: list[LeafSlice] = []
    for op in group:
        operand, ranks = editor.values[op.operand], editor.size(op.axes)
        for leaf in readiness(operand, op, order):
            shape = operand.leaves[leaf]
            if shape.size:
                kind, ways = _leaf_collective(op, operand, leaf, ranks)
                columns = row_size(operand.kind, shape, ways)
                number = len(items)
                items.append(LeafSlice(op.operand, op.result, leaf, shape.dtype, columns, ways, kind, number))
    return items


def _check_count(items: Sequence[LeafSlice], limit: int | None, op: Collective, file: str) -> None:
    """Raise CP0724 if leaves would be split into more than `MOST` pieces."""
    counts = [pieces(item, limit) for item in items]
    total = sum(count for count in counts if count > 1)
    if limit is None or total <= MOST:
        return
    nbytes = sum(item.nbytes for item, count in zip(items, counts, strict=True) if count > 1)
    # Sufficient for the proposed fix, since pieces may be larger than the limit (`PIECE`).
    sufficient_limit = -(-nbytes // MOST)
    message = f"`{name_of(op.operand)}` would be cut into {total:,} buckets; a stage has at most {MOST:,}"
    note = f"its leaves larger than a bucket have {nbytes:,} bytes, and a bucket {limit:,}"
    mebibytes = max(1, -(-sufficient_limit // 1024**2))
    remedy = (
        f"raise the limit: {{ bucket = {mebibytes}MiB }} on the stage, or the option max of the pass bucket"
    )
    fail("CP0724", message, note, remedy, "check the shapes", span=op.span, file=file)


def _leaf_collective(op: Collective, operand: Value, leaf: int, ranks: int) -> tuple[LeafCollective, int]:
    """The kind of collective for a leaf of `op`, or None, and the number of rows of its buffer."""
    is_scalar = operand.kind == "tree" and not operand.leaves[leaf].shape
    match op.kind:
        case "reduce_scatter":
            return ("all_reduce", 1) if is_scalar else ("reduce_scatter", ranks)
        case "all_gather":
            return (None, ranks) if is_scalar else ("all_gather", 1)
        case _:
            return op.kind, ranks if op.kind in TAKES_BLOCKS else 1


def readiness(operand: Value, op: Collective, order: Order) -> list[int]:
    """The order of the leaves of `operand` in messages of `op`, as leaf indices.

    Reductions follow the backward pass: `order`, or the last leaf first if it does not contain the operand.
    Other collectives follow the forward pass, first leaf first.

    Raises:
        CommplanError: CP0711 if `order` does not list each leaf of the operand once.
    """
    natural = list(range(len(operand.leaves)))
    if op.op is None:
        return natural
    name = name_of(operand.id)
    if name not in order:
        return natural[::-1]
    indices = {leaf.path: index for index, leaf in enumerate(operand.leaves)}
    wrong = sorted(set(order[name]) ^ set(indices))
    if wrong or len(order[name]) != len(indices):
        note = f"expected every path once; wrong: {', '.join(wrong[:5]) or 'one is named twice'}"
        fail("CP0711", f"the order for `{name}` does not list its leaves", note, span=op.span)
    return [indices[path] for path in order[name]]


def _emit(editor: Editor, op: Collective, bucket: LeafBucket, runs: list[Part], name: Ref) -> Ref:
    """Emit the pack of a bucket and its collective, and return the buffer to unpack.

    Integers of a mean are reduced by the hint `integers`: to their maximum, or to the values of the first
    rank by a broadcast.
    """
    packed = editor.pack(runs, op.span, f"{name}/pack", bucket.ways)
    if bucket.leaf_collective is None:
        return packed
    integers = op.hints.integers
    if integers is not None:
        op = replace(op, hints=replace(op.hints, integers=None))
        if not bucket.dtype.is_float and integers == "max":
            op = replace(op, op="max", divisor=1)
        elif not bucket.dtype.is_float:  # the values of the first rank
            changes = {"kind": "broadcast", "op": None, "root": 0, "divisor": 1, "pinned": False}
            return editor.move(op, packed, name, algorithm=Algorithm("native"), **changes)
    are_scalars = op.kind == "reduce_scatter" and bucket.leaf_collective == "all_reduce"
    algorithm = scalar_algorithm(op.algorithm) if are_scalars else op.algorithm
    return editor.move(op, packed, name, kind=bucket.leaf_collective, algorithm=algorithm)


def rewrite_flat(
    schedule: Schedule,
    phase: Phase,
    order: Order,
    matches: Callable[[Collective], bool],
    rewrite: Rewrite,
    choices: list[Choice],
) -> Phase:
    """Apply `rewrite` to each collective of a phase for which `matches` holds.

    y = collective(tree)  -->  y = unpack(rewritten(pack(tree))), if `bucket` has not packed it

    Args:
        schedule: The schedule.
        phase: One of its phases.
        order: The order of the backward pass, for collectives that are packed here.
        matches: Whether a collective is rewritten; called before and after it is packed.
        rewrite: Emits the replacement.
        choices: Receives the decisions of `rewrite`.

    Returns:
        The rewritten phase; `phase` itself if no collective matches.
    """
    if not any(isinstance(op, Collective) and matches(op) for op in phase.ops):
        return phase
    editor = Editor(schedule, phase)
    for op in phase.ops:
        if isinstance(op, Collective) and matches(op) and editor.values[op.operand].kind != "flat":
            pack_collectives(editor, [op], items_of(editor, [op], order), None)
        else:
            editor.ops.append(op)
    packed = editor.take()
    padding_allowed = read_by_parts(packed)
    for op in packed:
        if isinstance(op, Collective) and matches(op):
            rewrite(editor, op, op.result in padding_allowed, choices)
        else:
            editor.ops.append(op)
    return editor.finish(editor.ops)
