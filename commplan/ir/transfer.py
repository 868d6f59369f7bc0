"""Shared parts of `transfer` and `check` of ops (`ir.ops`): operand values and result types.

`transfer` of an op infers its results from its operands, and `check` yields the rules that it violates. The
checks in this module have the codes CP0731 (kinds and leaves), CP0734 (placements and axes) and CP0735
(arguments).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from commplan.diagnostics import with_article
from commplan.ir.refs import Ref
from commplan.ir.shard_shapes import cut, row_size
from commplan.ir.types import SAME, AxisKind, DType, Placement
from commplan.ir.values import Leaf, Part, Value

if TYPE_CHECKING:
    from commplan.ir.stages.rules import Violation

# The results of an op, in order.
Results = tuple[Value, ...]
# The code and the message of each violated rule.
Violations = Iterator[tuple[str, str]]


def broken(code: str, violation: Violation | None) -> Violations:
    """Yield `violation` of a rule of stages (`ir.stages.rules`) with `code`; nothing if it is None."""
    if violation is not None:
        yield code, violation.message


class ValueTypes:
    """The values that an op may refer to, and the axes, functions and sources of its schedule.

    Args:
        axes: The axes: `schedule.Axis` structs.
        values: The values before the op, and its declared results, by name. An op takes properties that it
            cannot infer from its declared results, such as the leaves of a tree that a function returns.
        fns: The functions by name: `schedule.FnType` structs.
        sources: The sources: `schedule.SourceType` structs.

    Attributes:
        sizes: The sizes of the axes by name, in declaration order.
        kinds: The kinds of the axes by name.
        values: As passed in.
        fns: As passed in; empty if None.
        sources: The sources by name.
    """

    def __init__(
        self,
        axes: Sequence[Any],
        values: Mapping[Ref, Value],
        fns: Mapping[str, Any] | None = None,
        sources: Iterable[Any] = (),
    ) -> None:
        self.sizes: dict[str, int] = {axis.name: axis.size for axis in axes}
        self.kinds: dict[str, AxisKind] = {axis.name: axis.kind for axis in axes}
        self.values, self.fns = values, fns or {}
        self.sources: dict[str, Any] = {source.name: source for source in sources}

    def ranks(self, axes: Iterable[str]) -> int:
        """The number of ranks along `axes`; 1 if there are none."""
        return math.prod(self.sizes[axis] for axis in axes)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in declaration order."""
        inside = set(axes)
        return tuple(axis for axis in self.sizes if axis in inside)

    def per(self, placement: Placement, axes: Iterable[str]) -> Placement:
        """`placement`, but with independent values on ranks along `axes`."""
        others_same = placement.without(axes)
        return msgspec.structs.replace(others_same, per=self.ordered((*others_same.per, *axes)))

    def join(self, placements: Iterable[Placement]) -> Placement:
        """The placement of a value computed from values with these placements; `SAME` if there are none.

        It varies along all axes along which an operand varies. It is split (or stacked) as the operands that
        are split (or stacked), if these agree; if they differ, it is `per` their axes.
        """
        result: Placement | None = None
        for placement in dict.fromkeys(placements):
            result = placement if result is None else self._both(result, placement)
        return result or SAME

    def _both(self, first: Placement, second: Placement) -> Placement:
        """As `join`, for two placements."""
        mixed = [*first.per, *second.per]
        for first_axes, second_axes in ((first.split, second.split), (first.stacked, second.stacked)):
            if first_axes and second_axes and first_axes != second_axes:
                mixed += [*first_axes, *second_axes]
        partial = self.ordered((*first.partial, *second.partial))
        split, stacked = first.split or second.split, first.stacked or second.stacked
        both = msgspec.structs.replace(first, partial=partial, split=split, stacked=stacked)
        return self.per(both, mixed)

    def check_terms(self, refs: Iterable[Ref]) -> Violations:
        """Check that all of `refs` are partial along the same axes (CP0734).

        Otherwise a term of a sum would be combined with a value that is none.
        """
        refs = tuple(dict.fromkeys(refs))
        sums = {frozenset(self.values[ref].placement.partial): ref for ref in refs}
        if len(sums) > 1:
            (first, first_ref), (second, second_ref) = list(sums.items())[:2]
            message = f"one is a term of a sum over `{min(first ^ second)}`, the other is not"
            yield "CP0734", f"of `{first_ref}` and `{second_ref}` {message}"

    def check_axes(self, axes: Sequence[str], kind: AxisKind | None = None) -> Violations:
        """Check that `axes` exist, are no servers, are unique, and have `kind` if it is not None (CP0734)."""
        for axis in axes:
            if axis not in self.sizes:
                yield "CP0734", f"there is no axis `{axis}`"
                return
            if self.kinds[axis] is AxisKind.SERVER or (kind and self.kinds[axis] is not kind):
                yield "CP0734", f"`{axis}` is {with_article(str(self.kinds[axis]))} and cannot be used here"
                return
        if len(set(axes)) != len(axes):
            yield "CP0734", f"an axis is named twice: {', '.join(axes)}"

    def check_cut(self, ref: Ref, axes: Sequence[str], owners: Sequence[int]) -> Violations:
        """Check that `ref` can be split along `axes`, at least one (CP0734).

        If `owners` is not empty, only these ranks along `axes` own a shard. They must exist and be unique
        (CP0735).
        """
        if not axes:
            yield "CP0734", f"`{ref}` is cut over no axis"
        wrong = [*self.check_axes(axes)]
        yield from wrong
        if wrong or not owners:
            return
        if len(set(owners)) != len(owners):
            yield "CP0735", f"a rank owns two parts of `{ref}`: {list(owners)}"
        ranks = self.ranks(axes)
        if not all(0 <= rank < ranks for rank in owners):
            yield "CP0735", f"there is no such owner among {ranks} ranks: {list(owners)}"

    def check_leaves(self, ref: Ref, expected: tuple[Leaf, ...]) -> Violations:
        """Check that `ref` has the leaves `expected` (CP0731)."""
        if self.values[ref].leaves != expected:
            actual = shown(self.values[ref].leaves)
            yield "CP0731", f"`{ref}` has the leaves {actual}, expected {shown(expected)}"

    def check_scalar(self, ref: object) -> Violations:
        """Check that `ref` has one leaf, a scalar (CP0731). Accepts a number or None instead of a value."""
        if isinstance(ref, str) and [leaf.shape for leaf in self.values[ref].leaves] != [()]:
            yield "CP0731", f"`{ref}` is {shown(self.values[ref].leaves)}, expected a scalar"

    def check_rows(self, ref: Ref, ways: int) -> Violations:
        """Check that `ref` is a flat buffer that consists of `ways` equal rows (CP0731)."""
        value = self.values[ref]
        if value.kind != "flat" or ways < 1 or value.leaves[0].size % ways:
            yield "CP0731", f"`{ref}` is not a flat buffer of {ways} rows"

    def check_part(self, part: Part, leaves_of: Ref, ways: int, columns: int) -> Violations:
        """Check that a part fits in a row of its leaf and in a row of its buffer (CP0731).

        Args:
            part: The part.
            leaves_of: The value with the leaf.
            ways: The number of rows of leaf and buffer.
            columns: The number of elements in a row of the buffer.
        """
        value = self.values[leaves_of]
        if not 0 <= part.leaf < len(value.leaves):
            yield "CP0731", f"`{leaves_of}` has no leaf {part.leaf}"
            return
        row = row_size(value.kind, value.leaves[part.leaf], ways)
        inside = part.start >= 0 and part.size >= 1 and part.start + part.size <= row
        if not inside or not 0 <= part.offset <= columns - part.size:
            where = f"elements {part.start} to {part.start + part.size} of leaf {part.leaf} of `{leaves_of}`"
            yield "CP0731", f"{where} are not inside its row of {row} and the buffer's of {columns}"

    def part(self, value: Value, result: Ref, axes: Sequence[str], owners: Sequence[int] = ()) -> Value:
        """The shard of `value` on one rank.

        Args:
            value: The value, which is the same along `axes`.
            result: The name of the shard.
            axes: The axes along which it is cut, in a single cut among all their ranks.
            owners: The ranks along `axes` that own a shard; all if it is empty. The result is split if all
                ranks own a shard, and `per` rank otherwise.
        """
        placement = value.placement.without(axes)
        ways = len(owners) or self.ranks(axes)
        split = msgspec.structs.replace(placement, split=(*placement.split, *axes))
        leaves = tuple(cut(value.kind, leaf, ways) for leaf in value.leaves)
        if owners:
            return Value(result, value.kind, leaves, self.per(placement, axes))
        whole = value.uncut if value.kind in ("tree", "array") else ()
        return Value(result, value.kind, leaves, split, whole)

    def with_whole(self, value: Value) -> Value:
        """`value`, a piece of a split value, with `whole` set to the leaves that all its shards form.

        Their leading dimension is the number of shards times that of a shard. Values that have `whole`, are
        not split, or are no trees or arrays are returned unchanged.
        """
        ways = self.ranks(value.placement.split)
        if value.kind not in ("tree", "array") or value.whole or not value.placement.split:
            return value
        return msgspec.structs.replace(value, whole=tuple(leaf.rows(ways) for leaf in value.leaves))


def flat(ref: Ref, size: int, dtype: DType, placement: Placement) -> Value:
    """The flat buffer `ref` of `size` elements."""
    return Value(ref, "flat", (Leaf("", (size,), dtype),), placement)


def value_like(value: Value, ref: Ref, placement: Placement | None = None) -> Value:
    """A value `ref` like `value`, with another placement unless `placement` is None."""
    return Value(ref, value.kind, value.leaves, placement or value.placement, value.whole)


def shown(leaves: tuple[Leaf, ...]) -> str:
    """The paths, types and shapes of the first three leaves, for messages; `none` if there are none."""
    words = [f"{leaf.path or 'array'} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3]]
    return ", ".join([*words, "..."] if len(leaves) > 3 else words) or "none"
