"""Shards that only a few ranks own: reduces gradients to the owners, and broadcasts their results.

Each leaf is split into as many equal rows as there are owners. Owner j stores row j, so the load is equal up
to padding.

Under MPI, rows are sent in pieces. One piece is updated and sent back while the next is reduced, which uses
links in both directions. With n pieces, the second direction finishes 1/n of the transfer time after the
first, so more than `PIECES` pieces would gain little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from commplan.diagnostics import Span
from commplan.ir.grouping import grouped
from commplan.ir.hints import NO_HINTS
from commplan.ir.plan import Algorithm, Hints, Ref
from commplan.ir.schedule import Collective, LocalSum, Ownership, Part, Value, network_lane
from commplan.ir.shard_shapes import row_size
from commplan.ir.types import DType
from commplan.passes.rewrite import Editor, in_whole, laid_out, unpack
from commplan.select.options import NATIVE

PIECES = 8  # maximum number of pieces, over all rows
LEAST = 256 * 1024  # minimum bytes of a piece, over all rows


def reduce_rows(editor: Editor, like: Collective, owners: tuple[int, ...]) -> Ref:
    """Emit a reduction by rows: each owner gets its row and other ranks zeros; scalars are all-reduced.

        s = sum(g)  -->  b = pack(g, rows); r0 = reduce(row 0 of b) to its owner; ..; s = unpack(r0 + r1 + ..)

    Rows are split into pieces, and all reductions are emitted before any result is used.

    Args:
        editor: Receives the ops.
        like: The reduce-scatter to replace, whose operand is a tree or an array.
        owners: The ranks of the owners, counted over the axes of `like`.

    Returns:
        The name of the result.
    """
    operand, result = like.operand, like.result
    value, ways = editor.values[operand], len(owners)
    placed: list[Part] = []
    # For each piece, its name, the result of the reduction to each owner, and the parts of leaves in it.
    summed: list[tuple[str, list[Ref], list[Part]]] = []
    for dtype, leaves in _by_dtype(value):
        sizes = [row_size(value.kind, value.leaves[leaf], ways) for leaf in leaves]
        for number, parts in enumerate(_pieces(editor, operand, leaves, sizes, ways, dtype)):
            name = f"{result}/{dtype}_p{number}" if number else f"{result}/{dtype}"
            summed.append((name, _reduce_piece(editor, name, parts, owners, like), parts))
    for name, reduced, parts in summed:
        own_row = _one_of(editor, f"{name}/own", reduced, like.span)
        placed += [replace(part, value=own_row) for part in parts]
    for dtype, leaves in _by_dtype(value, scalars=True):
        name = f"{result}/{dtype}_scalars"
        buffer = editor.pack(_run(operand, leaves, [1] * len(leaves)), like.span, f"{name}/pack")
        total = editor.move(like, buffer, name, kind="all_reduce", op="sum", algorithm=NATIVE, pinned=False)
        placed += _run(total, leaves, [1] * len(leaves))
    editor.add(editor.types.part(value, result, like.axes, owners))
    return editor.emit(unpack(result, placed, like.span, operand))


def _pieces(
    editor: Editor, ref: Ref, leaves: list[int], sizes: list[int], ways: int, dtype: DType
) -> list[list[Part]]:
    """Split the columns of `leaves` into equal pieces, under MPI; elsewhere they are one piece.

    Args:
        editor: The phase.
        ref: The value.
        leaves: Its leaves of one dtype, by index.
        sizes: The number of columns of each leaf.
        ways: The number of rows of each leaf.
        dtype: The dtype of the leaves.

    Returns:
        The parts of each piece, with offsets in a buffer for this piece.
    """
    columns, count = sum(sizes), 1
    if editor.schedule.backend == "mpi":
        count = max(1, min(PIECES // ways, columns * ways * dtype.nbytes // LEAST))
    ends = [columns * (piece + 1) // count for piece in range(count)]
    pieces: list[list[Part]] = [[] for _ in ends]
    for run in _run(ref, leaves, sizes):
        for piece, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            low = max(run.offset, begin)
            high = min(run.offset + run.size, end)
            if low < high:
                pieces[piece].append(Part(ref, run.leaf, low - run.offset, high - low, low - begin))
    return pieces


def _reduce_piece(
    editor: Editor, name: str, parts: list[Part], owners: tuple[int, ...], like: Collective
) -> list[Ref]:
    """Emit the reductions of a piece, one to each owner, and return their results."""
    ways = len(owners)
    columns = sum(part.size for part in parts)
    buffer = editor.pack(parts, like.span, f"{name}/rows", ways)
    reduced: list[Ref] = []
    for number, owner in enumerate(owners):
        row = buffer
        if ways > 1:
            part = Part(buffer, 0, number * columns, columns, 0)
            row = editor.pack((part,), like.span, f"{name}_{number}/row")
        reduced.append(editor.move(like, row, f"{name}_{number}", kind="reduce", op="sum", root=owner))
    return reduced


class StageOrigin(NamedTuple):
    """The stage of the plan that a collective comes from.

    Attributes:
        span: Its location in the plan.
        stages: The stages that the collective carries out, as in `Collective.stages`.
        hints: The hints of the collective.
        via: The algorithm that the plan specifies; None if it does not.
    """

    span: Span
    stages: tuple[Ref, ...]
    hints: Hints = NO_HINTS
    via: Algorithm | None = None


def join_parts(editor: Editor, operand: Ref, result: Ref, ownership: Ownership, origin: StageOrigin) -> None:
    """Emit the assembly of a whole value from shards.

    Args:
        editor: Receives the ops, and contains the declarations of both values.
        operand: The value whose shard each owner has.
        result: The whole value.
        ownership: The owners.
        origin: The stage of the plan, for the collectives.

    If all ranks are owners:

        w = gather(parts)  -->  w = all_gather(parts)

    Otherwise:

        w = gather(rows)
        -->  b = pack(rows); w0 = broadcast(b) from the first owner; ..; w = unpack(w0, w1, ..)

    Scalars are then those of the first owner.
    """
    value, whole, owners = editor.values[operand], editor.values[result], ownership.owners
    lane = network_lane(editor.schedule.axes, ownership.axes)
    like = Collective(
        "broadcast", result, "", ownership.axes, DType.F32, 0, origin.span,
        algorithm=origin.via or NATIVE, hints=origin.hints, lane=lane, stages=origin.stages,
        pinned=origin.via is not None,
    )  # fmt: skip
    if not owners:
        editor.move(like, operand, kind="all_gather")
        return
    placed: list[Part] = []
    for scalars in (False, True):
        for dtype, leaves in _by_dtype(value, scalars=scalars):
            sizes = [value.leaves[leaf].size for leaf in leaves]
            name = f"{result}/{dtype}{'_scalars' if scalars else ''}"
            buffer = editor.pack(_run(operand, leaves, sizes), origin.span, f"{name}/pack")
            for number, owner in enumerate(owners[:1] if scalars else owners):
                row = editor.move(like, buffer, f"{name}_{number}", root=owner)
                placed += in_whole(_run(row, leaves, sizes), number, value, whole)
    editor.ops.append(unpack(result, placed, origin.span, operand))


def _by_dtype(value: Value, *, scalars: bool = False) -> Iterable[tuple[DType, list[int]]]:
    """The indices of array leaves, or of scalars, grouped by dtype. Leaves without elements are omitted."""
    leaves = value.leaves
    selected = (i for i, leaf in enumerate(leaves) if bool(leaf.shape) != scalars and leaf.size)
    return grouped(selected, lambda index: leaves[index].dtype).items()


def _run(ref: Ref, leaves: list[int], sizes: list[int]) -> list[Part]:
    """The parts of a buffer that contains `leaves` one after another, with `sizes` elements each.

    `ref` is the value to pack, or the buffer to unpack.
    """
    return laid_out(Part(ref, leaf, 0, size, 0) for leaf, size in zip(leaves, sizes, strict=True))


def _one_of(editor: Editor, name: Ref, reduced: list[Ref], span: Span) -> Ref:
    """Emit the selection of this rank's row. Each rank has at most one nonzero row, so the rows are added."""
    if len(reduced) == 1:
        return reduced[0]
    size = editor.leaf(reduced[0]).size
    parts = [Part(row, 0, 0, size, index * size) for index, row in enumerate(reduced)]
    stack = editor.pack(parts, span, f"{name}/all")
    return editor.emit(LocalSum(name, stack, len(reduced), span), name)
