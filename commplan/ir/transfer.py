"""What `transfer` and `check` of ops (`ir.ops`) see and share: what results are, given the operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from commplan.ir.refs import Ref
from commplan.ir.shard_shapes import cut, row_size
from commplan.ir.types import SAME, AxisKind, DType, Placement
from commplan.ir.values import Leaf, Part, Value

if TYPE_CHECKING:
    from commplan.ir.stages.rules import Violation

Results = tuple[Value, ...]
Violations = Iterator[tuple[str, str]]  # code and message of each rule that an op breaks


def broken(code: str, violation: Violation | None) -> Violations:
    """A rule of stages (`ir.stages.rules`), where it is broken."""
    if violation is not None:
        yield code, violation.message


class ValueTypes:
    """The values of a phase by name, and the `Axis`, `FnType` and `SourceType` structs of its schedule.

    Values are those before the op, and its results as they are declared: what is bound from outside, such as
    the leaves of a tree that a function makes, an op takes from there.
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
        """`axes` as the plan declares them."""
        inside = set(axes)
        return tuple(axis for axis in self.sizes if axis in inside)

    def per(self, placement: Placement, axes: Iterable[str]) -> Placement:
        """`placement` where ranks along `axes` hold different things."""
        rest = placement.without(axes)
        return msgspec.structs.replace(rest, per=self.ordered((*rest.per, *axes)))

    def join(self, placements: Iterable[Placement]) -> Placement:
        """How a value lies that is made of values that lie so: cut, or stacked, where all agree."""
        joined: Placement | None = None
        for placement in dict.fromkeys(placements):
            joined = placement if joined is None else self._both(joined, placement)
        return joined or SAME

    def _both(self, left: Placement, right: Placement) -> Placement:
        mixed = [*left.per, *right.per]
        for mine, theirs in ((left.split, right.split), (left.stacked, right.stacked)):
            mixed += [*mine, *theirs] if mine and theirs and mine != theirs else []
        partial = self.ordered((*left.partial, *right.partial))
        split, stacked = left.split or right.split, left.stacked or right.stacked
        both = msgspec.structs.replace(left, partial=partial, split=split, stacked=stacked)
        return self.per(both, mixed)

    def check_terms(self, refs: Iterable[Ref]) -> Violations:
        """Terms of a sum go with terms of the same sum."""
        refs = tuple(dict.fromkeys(refs))
        sums = {frozenset(self.values[ref].placement.partial): ref for ref in refs}
        if len(sums) > 1:
            (first, left), (second, right) = list(sums.items())[:2]
            message = f"one is a term of a sum over `{min(first ^ second)}`, the other is not"
            yield "CP0734", f"of `{left}` and `{right}` {message}"

    def check_axes(self, axes: Sequence[str], kind: AxisKind | None = None) -> Violations:
        """`axes` are known, no servers, named once, and of `kind` where one is wanted."""
        for axis in axes:
            if axis not in self.sizes:
                yield "CP0734", f"there is no axis `{axis}`"
                return
            if self.kinds[axis] is AxisKind.SERVER or (kind and self.kinds[axis] is not kind):
                yield "CP0734", f"`{axis}` is a {self.kinds[axis]} and cannot be used here"
                return
        if len(set(axes)) != len(axes):
            yield "CP0734", f"an axis is named twice: {', '.join(axes)}"

    def check_cut(self, ref: Ref, axes: Sequence[str], owners: Sequence[int]) -> Violations:
        """`ref` is cut among the ranks along `axes`, or among `owners` of them."""
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

    def check_leaves(self, ref: Ref, wanted: tuple[Leaf, ...]) -> Violations:
        if self.values[ref].leaves != wanted:
            actual = shown(self.values[ref].leaves)
            yield "CP0731", f"`{ref}` has the leaves {actual}, {shown(wanted)} were expected"

    def check_scalar(self, ref: object) -> Violations:
        if isinstance(ref, str) and [leaf.shape for leaf in self.values[ref].leaves] != [()]:
            yield "CP0731", f"`{ref}` is {shown(self.values[ref].leaves)}: a scalar was expected"

    def check_rows(self, ref: Ref, ways: int) -> Violations:
        value = self.values[ref]
        if value.kind != "flat" or ways < 1 or value.leaves[0].size % ways:
            yield "CP0731", f"`{ref}` is no flat buffer of {ways} rows"

    def check_part(self, part: Part, leaves_of: Ref, ways: int, columns: int) -> Violations:
        """A part lies inside its leaf of `leaves_of`, and inside a buffer's row of `columns`."""
        value = self.values[leaves_of]
        if not 0 <= part.leaf < len(value.leaves):
            yield "CP0731", f"`{leaves_of}` has no leaf {part.leaf}"
            return
        row = row_size(value.kind, value.leaves[part.leaf], ways)
        inside = part.start >= 0 and part.size >= 1 and part.start + part.size <= row
        if not inside or not 0 <= part.offset <= columns - part.size:
            where = f"elements {part.start} to {part.start + part.size} of leaf {part.leaf} of `{leaves_of}`"
            yield "CP0731", f"{where} do not lie inside its row of {row} and the buffer's of {columns}"

    def part(self, value: Value, result: Ref, axes: Sequence[str], owners: Sequence[int] = ()) -> Value:
        """What one rank has of `value` where each rank along `axes` has its cut; or the `owners` among
        them, one each."""
        placement, ways = value.placement.without(axes), len(owners) or self.ranks(axes)
        split = msgspec.structs.replace(placement, split=(*placement.split, *axes))
        leaves = tuple(cut(value.kind, leaf, ways) for leaf in value.leaves)
        if owners:
            return Value(result, value.kind, leaves, self.per(placement, axes))
        whole = value.uncut if value.kind in ("tree", "array") else ()
        return Value(result, value.kind, leaves, split, whole)

    def with_whole(self, value: Value) -> Value:
        """`value`, a piece of something cut, with the leaves that its cuts make together."""
        ways = self.ranks(value.placement.split)
        if value.kind not in ("tree", "array") or value.whole or not value.placement.split:
            return value
        whole = tuple(Leaf(x.path, tuple(ways * size for size in x.shape), x.dtype) for x in value.leaves)
        return msgspec.structs.replace(value, whole=whole)


def flat(ref: Ref, size: int, dtype: DType, placement: Placement) -> Value:
    """A flat buffer of `size` elements."""
    return Value(ref, "flat", (Leaf("", (size,), dtype),), placement)


def placed(value: Value, ref: Ref, placement: Placement | None = None) -> Value:
    """`value` as another value, which lies elsewhere where `placement` says so."""
    return Value(ref, value.kind, value.leaves, placement or value.placement, value.whole)


def shown(leaves: tuple[Leaf, ...]) -> str:
    """Leaves in a message."""
    words = [f"{leaf.path or 'array'} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3]]
    return ", ".join([*words, "..."] if len(leaves) > 3 else words) or "none"
