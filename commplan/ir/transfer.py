"""Shared parts of `transfer` and `check` of ops (`ir.ops`): operand values and result types."""

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

Results = tuple[Value, ...]
Violations = Iterator[tuple[str, str]]  # code and message of each violated rule


def broken(code: str, violation: Violation | None) -> Violations:
    """Yield a violated rule of stages (`ir.stages.rules`), if there is one."""
    if violation is not None:
        yield code, violation.message


class ValueTypes:
    """The values of a phase by name, and the `Axis`, `FnType` and `SourceType` structs of its schedule.

    Values are those before an op and its declared results. An op takes properties that are bound from outside
    from these, such as the leaves of a tree that a function returns.
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
        return math.prod(self.sizes[axis] for axis in axes)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in declaration order."""
        inside = set(axes)
        return tuple(axis for axis in self.sizes if axis in inside)

    def per(self, placement: Placement, axes: Iterable[str]) -> Placement:
        """`placement`, but with different values on ranks along `axes`."""
        others_same = placement.without(axes)
        return msgspec.structs.replace(others_same, per=self.ordered((*others_same.per, *axes)))

    def join(self, placements: Iterable[Placement]) -> Placement:
        """The placement of a value computed from values with these placements.

        It is split or stacked if all of them agree.
        """
        result: Placement | None = None
        for placement in dict.fromkeys(placements):
            result = placement if result is None else self._both(result, placement)
        return result or SAME

    def _both(self, first: Placement, second: Placement) -> Placement:
        mixed = [*first.per, *second.per]
        for first_axes, second_axes in ((first.split, second.split), (first.stacked, second.stacked)):
            mixed += (
                [*first_axes, *second_axes]
                if first_axes and second_axes and first_axes != second_axes
                else []
            )
        partial = self.ordered((*first.partial, *second.partial))
        split, stacked = first.split or second.split, first.stacked or second.stacked
        both = msgspec.structs.replace(first, partial=partial, split=split, stacked=stacked)
        return self.per(both, mixed)

    def check_terms(self, refs: Iterable[Ref]) -> Violations:
        """Check that terms of a sum are combined only with terms of the same sum."""
        refs = tuple(dict.fromkeys(refs))
        sums = {frozenset(self.values[ref].placement.partial): ref for ref in refs}
        if len(sums) > 1:
            (first, first_ref), (second, second_ref) = list(sums.items())[:2]
            message = f"one is a term of a sum over `{min(first ^ second)}`, the other is not"
            yield "CP0734", f"of `{first_ref}` and `{second_ref}` {message}"

    def check_axes(self, axes: Sequence[str], kind: AxisKind | None = None) -> Violations:
        """Check that `axes` exist, are no servers, are unique, and have `kind` if it is not None."""
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
        """Check that `ref` can be split among the ranks along `axes`, or among the `owners` of them."""
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
        if self.values[ref].leaves != expected:
            actual = shown(self.values[ref].leaves)
            yield "CP0731", f"`{ref}` has the leaves {actual}, expected {shown(expected)}"

    def check_scalar(self, ref: object) -> Violations:
        if isinstance(ref, str) and [leaf.shape for leaf in self.values[ref].leaves] != [()]:
            yield "CP0731", f"`{ref}` is {shown(self.values[ref].leaves)}, expected a scalar"

    def check_rows(self, ref: Ref, ways: int) -> Violations:
        value = self.values[ref]
        if value.kind != "flat" or ways < 1 or value.leaves[0].size % ways:
            yield "CP0731", f"`{ref}` is not a flat buffer of {ways} rows"

    def check_part(self, part: Part, leaves_of: Ref, ways: int, columns: int) -> Violations:
        """Check that a part fits in its leaf of `leaves_of` and in a buffer row of `columns` elements."""
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
        """The shard of `value` on one rank, split along `axes` or among the `owners` of them."""
        placement = value.placement.without(axes)
        ways = len(owners) or self.ranks(axes)
        split = msgspec.structs.replace(placement, split=(*placement.split, *axes))
        leaves = tuple(cut(value.kind, leaf, ways) for leaf in value.leaves)
        if owners:
            return Value(result, value.kind, leaves, self.per(placement, axes))
        whole = value.uncut if value.kind in ("tree", "array") else ()
        return Value(result, value.kind, leaves, split, whole)

    def with_whole(self, value: Value) -> Value:
        """`value`, a piece of a split value, with the leaves that all its shards form together."""
        ways = self.ranks(value.placement.split)
        if value.kind not in ("tree", "array") or value.whole or not value.placement.split:
            return value
        whole = tuple(Leaf(x.path, tuple(ways * size for size in x.shape), x.dtype) for x in value.leaves)
        return msgspec.structs.replace(value, whole=whole)


def flat(ref: Ref, size: int, dtype: DType, placement: Placement) -> Value:
    """A flat buffer of `size` elements."""
    return Value(ref, "flat", (Leaf("", (size,), dtype),), placement)


def placed(value: Value, ref: Ref, placement: Placement | None = None) -> Value:
    """`value` renamed to `ref`, with another placement if there is one."""
    return Value(ref, value.kind, value.leaves, placement or value.placement, value.whole)


def shown(leaves: tuple[Leaf, ...]) -> str:
    """A description of leaves for messages."""
    words = [f"{leaf.path or 'array'} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3]]
    return ", ".join([*words, "..."] if len(leaves) > 3 else words) or "none"
