"""Compares the collectives of a compiled step with those of a plan.

`match` aligns both sequences, and then explains collectives that do not align as moved, merged, split,
changed, missing or extra. `causes` determines why.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

import msgspec

from commplan.lowering.audit.expect import Expected, Groups
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep


class StepDifference(msgspec.Struct, frozen=True):
    """A difference between the plan and the compiled step.

    Attributes:
        kind: Kind of the difference: a planned collective is missing, is changed, was moved to another
            position, was merged with others, or was split; or a compiled one is extra.
        text: Description.
        expected: Collectives of the plan; empty if `kind` is `extra`.
        found: Collectives of the compiled step in their place; empty if `kind` is `missing`.
        cause: One word, see `causes`; empty if not yet determined.
        reason: A sentence; empty if not yet determined.
        is_additional: Whether all planned collectives are compiled, and the difference is only that the
            step's own code, or XLA's partitioner, has additional ones.
    """

    kind: Literal["missing", "extra", "changed", "moved", "merged", "split"]
    text: str
    expected: tuple[Expected, ...] = ()
    found: tuple[CompiledCollective, ...] = ()
    cause: str = ""
    reason: str = ""
    is_additional: bool = False


class StepComparison(msgspec.Struct, frozen=True):
    """The result of a comparison.

    Attributes:
        expected: The collectives of the plan.
        found: The collectives of the compiled step.
        differences: The differences.
        matches: Pairs that match the plan. A compiled collective is in several pairs if it was allowed to
            merge planned ones.
    """

    expected: tuple[Expected, ...]
    found: tuple[CompiledCollective, ...]
    differences: tuple[StepDifference, ...]
    matches: tuple[tuple[Expected, CompiledCollective], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the compiled step has exactly the plan's collectives."""
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            suffix = f", joined into {len(self.found)}" if len(self.found) < len(self.expected) else ""
            return f"{len(self.expected)} collectives, as planned{suffix}"
        return "\n".join(f"{difference.kind}: {difference.text}" for difference in self.differences)


def compare(expected: Sequence[Expected], step: CompiledStep, *, scope: str = "") -> StepComparison:
    """Compare the collectives of a plan with those of a compiled step.

    Args:
        expected: The plan's collectives.
        step: The compiled step.
        scope: Text that the `op_name` of a compiled collective must contain; others are ignored.
    """
    return match(expected, [item for item in step.collectives if scope in item.op_name])


def match(expected: Sequence[Expected], actual: Sequence[CompiledCollective]) -> StepComparison:
    """Compare a plan's collectives with those of a compiled step, both in order of issue."""
    expected_keys = [_key_of_expected(item) for item in expected]
    actual_keys = [_key_of_compiled(item) for item in actual]
    matches: list[tuple[Expected, CompiledCollective]] = []
    stretches: list[_Stretch] = []
    for tag, i, j, k, m in SequenceMatcher(None, expected_keys, actual_keys, autojunk=False).get_opcodes():
        if tag == "equal":
            matches += zip(expected[i:j], actual[k:m], strict=True)
        else:
            stretches.append(_Stretch(list(expected[i:j]), list(actual[k:m])))
    moved = _out_of_order(_take_moved(stretches, matches), expected, actual, matches)
    differences = [*_take_merged(stretches, matches), *_take_split(stretches)]
    for stretch in stretches:
        differences += _explain(*stretch)
    return StepComparison(tuple(expected), tuple(actual), (*differences, *moved), tuple(matches))


class _Stretch(NamedTuple):
    """A part of the two sequences without a match. Collectives are removed once they are explained.

    Attributes:
        expected: Planned collectives, in order.
        actual: Compiled collectives in their place, in order.
    """

    expected: list[Expected]
    actual: list[CompiledCollective]


def _key_of_expected(item: Expected) -> tuple[object, ...]:
    """A key that equals that of a compiled collective as planned; see `changed` for its entries."""
    return (item.kind, item.op, (item.dtype,), item.count, _plain(item.kind, item.groups), 1)


def _key_of_compiled(item: CompiledCollective) -> tuple[object, ...]:
    return (item.kind, item.op, item.dtypes, item.count, _plain(item.kind, item.groups), _arrays(item))


def _arrays(item: CompiledCollective) -> int:
    """The number of planned arrays in a compiled collective; more than 1 if others were merged into it."""
    # XLA:CPU represents an all-to-all with one operand per rank, and may reduce the arrays of a bucket
    # without packing them. Other collectives with several operands were merged.
    return 1 if item.kind == "all_to_all" or item.bucket else len(item.inputs)


def _plain(kind: str, groups: Groups) -> Groups:
    """Sort groups. Within a group the order matters for all collectives except an all-reduce."""
    return tuple(sorted(tuple(sorted(group)) if kind == "all_reduce" else group for group in groups))


def same_ranks(expected: Expected, actual: CompiledCollective) -> bool:
    """Whether both have the same groups, regardless of the order within groups."""
    return _plain("all_reduce", expected.groups) == _plain("all_reduce", actual.groups)


def _share_axis(groups: Groups, other_groups: Groups) -> bool:
    """Whether two ranks of the first of `groups` are both in one of `other_groups`.

    All groups of a collective extend along the same axes, so one group suffices.
    """
    return any(len(set(group).intersection(other)) > 1 for group in groups[:1] for other in other_groups)


def _take_moved(
    stretches: Sequence[_Stretch], matches: list[tuple[Expected, CompiledCollective]]
) -> list[StepDifference]:
    """Match collectives missing in one place with extra ones in another, and remove both from `stretches`.

    Messages of one plan line, and collectives that nothing orders, go to `matches`: slices of a chunk program
    are ordered only by data. For the others, returns a difference.
    """
    moved: list[StepDifference] = []
    for origin in stretches:
        for item in tuple(origin.expected):
            key = _key_of_expected(item)
            candidates = [
                (stretch, compiled)
                for stretch in stretches
                for compiled in stretch.actual
                if _key_of_compiled(compiled) == key
            ]
            if candidates:
                stretch, actual = candidates[0]
                origin.expected.remove(item)
                stretch.actual.remove(actual)
                if (item.kind == "permute" or item.free) and item.scope in actual.scopes:
                    matches.append((item, actual))
                    continue
                text = f"{item} is issued at another position ({actual.name})"
                moved.append(StepDifference("moved", text, (item,), (actual,)))
    return moved


def _out_of_order(
    moved: Sequence[StepDifference],
    expected: Sequence[Expected],
    actual: Sequence[CompiledCollective],
    matches: list[tuple[Expected, CompiledCollective]],
) -> list[StepDifference]:
    """The differences in `moved` whose order differs from other collectives over one of their axes.

    The others go to `matches`: only collectives that share an axis are ordered.

    Args:
        moved: Differences of kind `moved`, each with one planned and one compiled collective.
        expected: All planned collectives, in order of issue.
        actual: All compiled collectives, in order of issue.
        matches: The pairs that match so far; extended.
    """
    pairs = [(item, compiled) for item, compiled in matches if item.kind != "permute" and not item.free]
    pairs += [(move.expected[0], move.found[0]) for move in moved]
    planned, issued = {id(item) for item, _ in pairs}, {id(compiled) for _, compiled in pairs}

    def overtaken(groups: Groups) -> bool:
        planned_order = [i for i in expected if id(i) in planned and _share_axis(groups, i.groups)]
        issued_order = [c for c in actual if id(c) in issued and _share_axis(groups, c.groups)]
        return list(map(_key_of_expected, planned_order)) != list(map(_key_of_compiled, issued_order))

    differences = [move for move in moved if overtaken(move.expected[0].groups)]
    matches += [(m.expected[0], m.found[0]) for m in moved if not any(m is d for d in differences)]
    return differences


def _take_merged(
    stretches: Sequence[_Stretch], matches: list[tuple[Expected, CompiledCollective]]
) -> list[StepDifference]:
    """The differences of collectives merged into one, with several arrays or with one concatenated array.

    Removes them from `stretches`. If the compiler may merge them, they go to `matches` instead.
    """
    merged: list[StepDifference] = []
    for stretch in stretches:
        for actual in tuple(stretch.actual):
            near = (stretch, *(s for s in stretches if s is not stretch))
            parts = _parts_of(actual, [item for s in near for item in s.expected])
            # Other sizes belong to other stages. XLA keeps either all names of merged collectives, or none.
            whole = sum(item.count for item in parts) == actual.count
            is_merged = len(parts) > 1 if whole else len(actual.origins) > 1 or not actual.op_name
            if not parts or not (is_merged or _arrays(actual) > 1):
                continue
            stretch.actual.remove(actual)
            for s in stretches:
                s.expected[:] = [item for item in s.expected if not any(item is part for part in parts)]
            if all(item.free for item in parts):
                matches += [(item, actual) for item in parts]
                continue
            suffix = "" if whole else " and others of the step"
            first, *more = parts
            subject = f"{len(parts)} collectives" if more else f"{first}"
            merged.append(StepDifference("merged", f"{subject}{suffix} became 1: {actual}", parts, (actual,)))
    return merged


def _parts_of(actual: CompiledCollective, expected: Sequence[Expected]) -> tuple[Expected, ...]:
    """The planned collectives that `actual` consists of, selected in order by size; empty if none fits."""
    sizes = [tensor.size for tensor in actual.inputs] if _arrays(actual) > 1 else [actual.count]
    parts: list[Expected] = []
    for item in expected:
        same = (item.kind, item.op, (item.dtype,)) == (actual.kind, actual.op, actual.dtypes)
        if not same or not same_ranks(item, actual):
            continue
        if len(sizes) > 1 and item.count in sizes:
            sizes.remove(item.count)
            parts.append(item)
        elif len(sizes) == 1 and item.count <= sizes[0]:
            sizes[0] -= item.count
            parts.append(item)
    return tuple(parts)


def _take_split(stretches: Sequence[_Stretch]) -> list[StepDifference]:
    """The differences of all-reduces that became a reduce-scatter and an all-gather.

    Removes them from `stretches`.
    """
    split: list[StepDifference] = []
    for expected, actual in stretches:
        for item in tuple(expected):
            near = {
                collective.kind: collective for collective in reversed(actual) if same_ranks(item, collective)
            }
            parts = tuple(near[kind] for kind in ("reduce_scatter", "all_gather") if kind in near)
            if item.kind != "all_reduce" or "all_reduce" in near or len(parts) < 2:
                continue
            expected.remove(item)
            actual[:] = [collective for collective in actual if collective not in parts]
            text = f"{item} became {len(parts)}: {'; '.join(map(str, parts))}"
            split.append(StepDifference("split", text, (item,), parts))
    return split


def _explain(expected: Sequence[Expected], actual: Sequence[CompiledCollective]) -> list[StepDifference]:
    """The differences of a stretch without merged or split collectives.

    Collectives of one kind and plan line, or of one kind and position, count as changed.
    """
    if len(expected) == len(actual):
        pairs = list(zip(expected, actual, strict=True))
        if all(item.kind == compiled.kind for item, compiled in pairs):
            return [_difference_of_changes(item, compiled) for item, compiled in pairs]
    differences: list[StepDifference] = []
    unmatched = list(actual)
    for item in expected:
        same_line = (c for c in unmatched if c.kind == item.kind and item.scope in c.scopes)
        counterpart = next(same_line, None)
        if counterpart is None:
            differences.append(StepDifference("missing", f"{item}", (item,)))
            continue
        unmatched.remove(counterpart)
        differences.append(_difference_of_changes(item, counterpart))
    return differences + [StepDifference("extra", f"{item} ({item.name})", (), (item,)) for item in unmatched]


def _difference_of_changes(expected: Expected, actual: CompiledCollective) -> StepDifference:
    changes = ", ".join(
        f"{name} {_short(compiled)} instead of {_short(planned)}"
        for name, planned, compiled in changed(expected, actual)
    )
    return StepDifference("changed", f"{expected}: {changes}", (expected,), (actual,))


def changed(expected: Expected, actual: CompiledCollective) -> list[tuple[str, object, object]]:
    """The differing properties: (name, expected value, actual value)."""
    names = ("kind", "operation", "dtype", "elements", "groups", "arrays")
    pairs = zip(names, _key_of_expected(expected), _key_of_compiled(actual), strict=True)
    return [(name, planned, compiled) for name, planned, compiled in pairs if planned != compiled]


def _short(value: object) -> str:
    """The value as text, cut to 60 characters."""
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return text if len(text) <= 60 else f"{text[:60]}..."
