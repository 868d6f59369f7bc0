"""Utilities of rewrites: a phase editor, unique names, stable topological order, and buffer layout.

Most passes create an `Editor` for each phase, emit ops to it, and return `Editor.finish`.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from msgspec.structs import replace

from commplan.diagnostics import Span
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.ops import add_results
from commplan.ir.plan import Ref
from commplan.ir.schedule import (
    Collective,
    Leaf,
    Op,
    Pack,
    Part,
    Phase,
    Schedule,
    Unpack,
    Value,
    rename_results,
    widest,
)
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.ir.transfer import ValueTypes, flat
from commplan.ir.types import SAME


class Editor:
    """A phase during a rewrite.

    Attributes:
        schedule: The schedule before the rewrite.
        phase: The phase before the rewrite.
        values: The values of the phase and of the schedule's entry, by name. Rewrites add and replace values.
        ops: The ops emitted so far.
        types: Computes the types of results from `values`.
    """

    def __init__(self, schedule: Schedule, phase: Phase) -> None:
        self.schedule, self.phase = schedule, phase
        self.values = {value.id: value for value in (*schedule.entry, *phase.values)}
        self._declared = frozenset(self.values)
        self.ops: list[Op] = []
        self.types = ValueTypes(schedule.axes, self.values, schedule.fn_types, schedule.sources)

    @property
    def bound(self) -> set[Ref]:
        """The values bound to outputs and updates of the phase."""
        return {binding.value for binding in (*self.phase.outputs, *self.phase.updates)}

    @cached_property
    def uses(self) -> DefUse[Op]:
        """Definitions and uses of the ops before the rewrite."""
        return DefUse(self.phase.ops)

    def size(self, axes: Iterable[str]) -> int:
        """The number of ranks along `axes`."""
        return self.schedule.size(tuple(axes))

    def fresh(self, name: Ref) -> Ref:
        """Return `name`, with a numeric suffix if it is in use."""
        if name not in self.values:
            return name
        number = next(n for n in range(2, len(self.values) + 3) if f"{name}~{n}" not in self.values)
        return f"{name}~{number}"

    def add(self, value: Value) -> Ref:
        """Declare `value`, or replace the value of the same name; returns the name."""
        self.values[value.id] = value
        return value.id

    def take(self) -> list[Op]:
        """Return the ops emitted so far, and clear them."""
        ops, self.ops = self.ops, []
        return ops

    def emit(self, op: Op, name: Ref | None = None) -> Ref:
        """Append `op` and declare its results.

        Args:
            op: The op.
            name: The name of its only result, made unique (`fresh`); None to keep the names in `op`.

        Returns:
            The name of the first result.
        """
        if name is not None:
            (old,) = results_of(op)
            op = rename_results(op, {old: self.fresh(name)})
        add_results(op, self.types, self.values, self._declared)
        self.ops.append(op)
        return results_of(op)[0]

    def pack(
        self, parts: Sequence[Part], span: Span, name: Ref, ways: int = 1, size: int | None = None
    ) -> Ref:
        """Emit a flat buffer of parts of leaves.

        Args:
            parts: The parts, with their offsets; at least one, all of one dtype.
            span: The stage in the plan.
            name: The name of the buffer, made unique.
            ways: The number of rows (see `Pack`).
            size: The number of elements of the buffer, including padding; None to end with the last part.

        Returns:
            The name of the buffer.
        """
        leaf = self.values[parts[0].value].leaves[parts[0].leaf]
        size = size or ways * max(part.offset + part.size for part in parts)
        buffer = self.add(flat(self.fresh(name), size, leaf.dtype, SAME))
        return self.emit(Pack(buffer, tuple(parts), span, ways))

    def move(self, like: Collective, operand: Ref, name: Ref | None = None, **changes: Any) -> Ref:
        """Emit a copy of the collective `like` with another operand.

        Args:
            like: The collective to copy. Its dtype, size and `after` are replaced.
            operand: The new operand.
            name: The name of the result, made unique; None to keep that of `like`.
            changes: Other fields to replace.

        Returns:
            The name of the result.
        """
        value = self.values[operand]
        changes |= {"operand": operand, "dtype": widest(value.leaves), "nbytes": value.nbytes, "after": ()}
        return self.emit(replace(like, **changes), name)

    def leaf(self, ref: Ref) -> Leaf:
        """The only leaf of a flat value."""
        return self.values[ref].leaves[0]

    def finish(self, ops: Sequence[Op]) -> Phase:
        """Return the phase with `ops` in topological order, and their results as its values."""
        ordered = in_order(ops)
        values = tuple(self.values[ref] for op in ordered for ref in results_of(op))
        return replace(self.phase, ops=ordered, values=values)


def in_order(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Sort ops so that operands are defined before use, and otherwise keep their order.

    Ops in a cycle of operands or `after` come last; the verifier reports them.
    """
    makers = DefUse(ops).indices
    if all(
        makers.get(ref, -1) < index for index, op in enumerate(ops) for ref in (*operands_of(op), *op.after)
    ):
        return tuple(ops)  # the order is correct already, as after most rewrites
    sorter = TopologicalSorter(
        {
            index: {makers[ref] for ref in (*operands_of(op), *op.after) if ref in makers} - {index}
            for index, op in enumerate(ops)
        }
    )
    with contextlib.suppress(CycleError):
        sorter.prepare()
    ready = sorted(sorter.get_ready())
    done: list[int] = []
    while ready:
        done.append(heapq.heappop(ready))
        sorter.done(done[-1])
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
    done += sorted({*range(len(ops))}.difference(done))
    return tuple(ops[index] for index in done)


def laid_out(parts: Iterable[Part]) -> list[Part]:
    """`parts` with offsets that place them consecutively in a buffer."""
    laid: list[Part] = []
    offset = 0
    for part in parts:
        laid.append(Part(part.value, part.leaf, part.start, part.size, offset))
        offset += part.size
    return laid


def unpack(result: Ref, parts: Iterable[Part], span: Span, like: Ref | None, ways: int = 1) -> Unpack:
    """An unpack that assembles `result` from `parts` in any order; other arguments as in `Unpack`."""
    return Unpack(result, tuple(sorted(parts, key=lambda part: (part.leaf, part.start))), span, ways, like)


def in_whole(parts: Iterable[Part], owner: int, rows: Value, whole: Value) -> list[Part]:
    """Map runs of one row of a value to positions in the whole value, without padding.

    Args:
        parts: The runs, with starts in the row.
        owner: The number of the row.
        rows: The value as one row, whose leaves are equal parts of those of `whole`.
        whole: The whole value.

    Returns:
        The runs with starts in the whole value. Runs that contain only padding are omitted.
    """
    placed: list[Part] = []
    for part in parts:
        start = owner * rows.leaves[part.leaf].size + part.start
        size = min(part.size, whole.leaves[part.leaf].size - start)
        if size > 0:
            placed.append(replace(part, start=start, size=size))
    return placed


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def padded(editor: Editor, ref: Ref, size: int) -> Ref:
    """A buffer of `size` elements that starts with the flat value `ref`, followed by zeros.

    x = pack(..)  -->  x = pack(..) with padding, if `x` is a packed buffer without rows
    x             -->  y = pack(x) with padding, otherwise

    In the first case the size of `ref` changes, so no op that is emitted already may depend on its old size.
    """
    leaf = editor.leaf(ref)
    if leaf.size == size:
        return ref
    maker = next((op for op in reversed(editor.ops) if ref in results_of(op)), None)  # most often the last
    if isinstance(maker, Pack) and maker.ways == 1:
        grown = replace(editor.values[ref], leaves=(Leaf("", (size,), leaf.dtype),))
        editor.values[ref] = grown
        return ref
    span = maker.span if maker is not None else editor.phase.span
    return editor.pack((Part(ref, 0, 0, leaf.size, 0),), span, f"{ref}/padded", size=size)


def trimmed(editor: Editor, ref: Ref, like: Collective) -> None:
    """Emit the result of `like` as the first elements of buffer `ref`."""
    size = editor.leaf(like.result).size
    editor.emit(Pack(like.result, (Part(ref, 0, 0, size, 0),), like.span))


def read_by_parts(ops: Sequence[Op]) -> frozenset[Ref]:
    """Values whose readers all select runs of them, so that padding after the value has no effect."""
    partly_read: set[Ref] = set()
    whole: set[Ref] = set()
    for op in ops:
        by_parts = isinstance(op, Pack | Unpack) and op.ways == 1
        (partly_read if by_parts else whole).update(operands_of(op))
    return frozenset(partly_read - whole)
