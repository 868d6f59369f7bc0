"""Collectives on trees and arrays become collectives on flat buffers: what `bucket` is made of.

A buffer holds leaves, or a run of one giant leaf, of one dtype. Scalars have no shard: under a
reduce-scatter they are all-reduced, under an all-gather they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from commplan.diagnostics import fail
from commplan.ir.layout import row_size
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Collective, CollectiveKind, Op, Pack, Part, Unpack, Value
from commplan.ir.types import DType, Placement
from commplan.passes.rewrite import Editor

Order = Mapping[str, Sequence[str]]
WHOLE = 4  # a leaf of up to so many limits travels whole
PIECE = 2  # pieces of one that is larger are of at most so many limits
Fate = CollectiveKind | None  # what happens to a leaf; None: it is already what the result wants


class Item(msgspec.Struct, frozen=True):
    """A leaf on its way into a buffer: `columns` elements in each of `ways` rows."""

    value: Ref
    result: Ref
    leaf: int
    dtype: DType
    columns: int
    ways: int
    fate: Fate
    place: int  # in order of readiness


class Bucket(msgspec.Struct):
    """A buffer being filled: runs of items, each (item, first column, columns), `columns` in all."""

    dtype: DType
    ways: int
    fate: Fate
    runs: list[tuple[Item, int, int]] = msgspec.field(default_factory=list[tuple[Item, int, int]])
    columns: int = 0

    def add(self, item: Item, start: int, size: int) -> None:
        self.runs.append((item, start, size))
        self.columns += size

    @property
    def last(self) -> int:
        return self.runs[-1][0].place

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.columns * self.ways * self.dtype.nbytes

    @property
    def is_piece(self) -> bool:
        """Whether it holds a part of one leaf."""
        return self.runs[0][2] < self.runs[0][0].columns


def pack_collectives(
    editor: Editor, group: Sequence[Collective], limit: int | None, order: Order
) -> tuple[list[Op], list[Bucket]]:
    """Ops that replace `group` (same kind, axes, op and placement), and the buckets they use.

    y = all_reduce(x)  -->  b0 = pack(x..); r0 = all_reduce(b0); ..; y = unpack(r0..)

    `limit`: bytes of one rank's operand buffer; None for no limit. A leaf never shares a buffer
    with another dtype; one larger than the limit has a buffer of its own (see `fill`).
    """
    head = group[0]
    items: list[Item] = []
    for op in group:
        items += _items(editor, op, order, len(items))
    buckets = fill(items, limit)
    ops: list[Op] = []
    parts: dict[Ref, list[Part]] = {op.result: [] for op in group}
    for number, bucket in enumerate(buckets):
        buffer = _emit(editor, ops, head, bucket, f"{head.result}/b{number}")
        offset = 0
        for item, start, size in bucket.runs:
            parts[item.result].append(Part(buffer, item.leaf, start, size, offset))
            offset += size
    ways = editor.size(head.axes) if head.kind == "all_gather" else 1
    for op in group:
        ordered = sorted(parts[op.result], key=lambda part: (part.leaf, part.start))
        ops.append(Unpack(op.result, tuple(ordered), op.span, ways))
    return ops, buckets


def fill(items: Sequence[Item], limit: int | None) -> list[Bucket]:
    """Items into buckets, first come first in; buckets in the order in which they are complete.

    A leaf larger than the limit has a bucket of its own and stays whole up to `WHOLE` limits: its
    pieces would be ready at the same moment, so that all but the last have nothing to travel under,
    and each piece is a copy where a whole leaf is a reshape. A giant leaf, larger than that, is cut
    into equal pieces of at most `PIECE` limits, which bounds the buffers.
    """
    closed: list[Bucket] = []
    open_: dict[tuple[DType, int, Fate], Bucket] = {}
    for item in items:
        key = (item.dtype, item.ways, item.fate)
        row = item.dtype.nbytes * item.ways
        bucket = open_.get(key)
        if bucket is not None and limit is not None and (bucket.columns + item.columns) * row > limit:
            closed.append(open_.pop(key))
            bucket = None
        if limit is not None and item.columns * row > limit:
            for start, size in _runs(item, limit):
                closed.append(Bucket(*key))
                closed[-1].add(item, start, size)
            continue
        if bucket is None:
            bucket = open_[key] = Bucket(*key)
        bucket.add(item, 0, item.columns)
    return sorted([*closed, *open_.values()], key=lambda bucket: bucket.last)


def _runs(item: Item, limit: int) -> list[tuple[int, int]]:
    """A leaf larger than `limit` bytes as one run, or a giant one as equal runs: (first column, columns)."""
    row = item.dtype.nbytes * item.ways
    if item.columns * row <= WHOLE * limit:
        return [(0, item.columns)]
    pieces = math.ceil(item.columns / max(1, PIECE * limit // row))
    step = math.ceil(item.columns / pieces)
    return [(start, min(step, item.columns - start)) for start in range(0, item.columns, step)]


def _items(editor: Editor, op: Collective, order: Order, first: int) -> list[Item]:
    operand = editor.values[op.operand]
    ranks = editor.size(op.axes)
    items: list[Item] = []
    for leaf in readiness(operand, op, order):
        shape = operand.leaves[leaf]
        if not shape.size:
            continue
        fate, ways = _fate(op, operand, leaf, ranks)
        columns = row_size(operand.kind, shape, ways)
        items.append(Item(op.operand, op.result, leaf, shape.dtype, columns, ways, fate, first + len(items)))
    return items


def _fate(op: Collective, operand: Value, leaf: int, ranks: int) -> tuple[Fate, int]:
    scalar = operand.kind == "tree" and not operand.leaves[leaf].shape
    match op.kind:
        case "reduce_scatter":
            return ("all_reduce", 1) if scalar else ("reduce_scatter", ranks)
        case "all_gather":
            return (None, ranks) if scalar else ("all_gather", 1)
        case _:
            return op.kind, 1


def readiness(operand: Value, op: Collective, order: Order) -> list[int]:
    """Leaves of `operand` in the order in which they should travel.

    Reductions: as the backward pass makes them (`order`, else the last leaf first). Broadcasts
    and gathers: as the forward pass needs them, the first leaf first.
    """
    natural = list(range(len(operand.leaves)))
    if op.op is None:
        return natural
    name = name_of(operand.id)
    if name not in order:
        return natural[::-1]
    place = {leaf.path: index for index, leaf in enumerate(operand.leaves)}
    wrong = sorted(set(order[name]) ^ set(place))
    if wrong or len(order[name]) != len(place):
        fail(
            "CP0711",
            f"the order given for `{name}` is no order of its leaves",
            f"every path once; in doubt: {', '.join(wrong[:5]) or 'one is named twice'}",
            span=op.span,
        )
    return [place[path] for path in order[name]]


def _emit(editor: Editor, ops: list[Op], head: Collective, bucket: Bucket, name: Ref) -> Ref:
    """The pack of a bucket and its collective; gives back the buffer that the unpack reads."""
    operand = editor.values[head.operand].placement
    result = editor.values[head.result].placement
    columns, offset, parts = bucket.columns, 0, list[Part]()
    for item, start, size in bucket.runs:
        parts.append(Part(item.value, item.leaf, start, size, offset))
        offset += size
    where = result if bucket.fate is None else operand
    packed = editor.flat(f"{name}/pack", columns * bucket.ways, bucket.dtype, where)
    ops.append(Pack(packed, tuple(parts), head.span, bucket.ways))
    if bucket.fate is None:
        return packed
    size, placement = _outcome(editor, head, bucket, operand, result)
    buffer = editor.flat(name, size, bucket.dtype, placement)
    ops.append(
        msgspec.structs.replace(
            head,
            kind=bucket.fate,
            result=buffer,
            operand=packed,
            dtype=bucket.dtype,
            nbytes=bucket.nbytes,
            after=(),
        )
    )
    return buffer


def _outcome(
    editor: Editor, head: Collective, bucket: Bucket, operand: Placement, result: Placement
) -> tuple[int, Placement]:
    """Elements of a bucket's result on one rank, and how it lies."""
    match bucket.fate:
        case "all_gather":
            return bucket.columns * editor.size(head.axes), result
        case "all_reduce":
            return bucket.columns, operand.same_over(head.axes)
        case _:
            return bucket.columns, result
