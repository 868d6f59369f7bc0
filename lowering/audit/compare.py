"""How the collectives of a compiled step differ from those that a plan asks for."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

import msgspec

from commplan.lowering.audit.expect import Expected, Groups
from commplan.lowering.audit.step import CompiledCollective, CompiledStep


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as planned: what the plan expects, what the compiled step has in its place.

    cause: why, in one word (see `causes`); reason: in a sentence. Both are "" until `causes` has looked.
    beside: all of the plan is there, and this is what the step's own code has beside it.
    """

    kind: Literal["missing", "extra", "changed", "moved", "merged", "split"]
    text: str
    expected: tuple[Expected, ...] = ()
    found: tuple[CompiledCollective, ...] = ()
    cause: str = ""
    reason: str = ""
    beside: bool = False


class Report(msgspec.Struct, frozen=True):
    """The outcome of a comparison: `ok` if the compiled step has the plan's collectives and no others."""

    expected: tuple[Expected, ...]
    found: tuple[CompiledCollective, ...]
    differences: tuple[Difference, ...]
    matches: tuple[tuple[Expected, CompiledCollective], ...] = ()
    """What is as planned."""

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            joined = f", joined into {len(self.found)}" if len(self.found) < len(self.expected) else ""
            return f"{len(self.expected)} collectives, as planned{joined}"
        return "\n".join(f"{difference.kind}: {difference.text}" for difference in self.differences)


def compare(wanted: Sequence[Expected], step: CompiledStep, *, scope: str = "") -> Report:
    """Compare what a plan asks for with what a compiled step has.

    `scope`: look only at the collectives whose `op_name` contains it (all of them by default).
    """
    return match(wanted, [item for item in step.collectives if scope in item.op_name])


def match(wanted: Sequence[Expected], actual: Sequence[CompiledCollective]) -> Report:
    """Compare what a plan asks for with collectives of a compiled step, both in the order of issue."""
    left, right = [_key_of(item) for item in wanted], [_key_found(item) for item in actual]
    matches: list[tuple[Expected, CompiledCollective]] = []
    stretches: list[_Stretch] = []
    for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            matches += zip(wanted[i:j], actual[k:m], strict=True)
        else:
            stretches.append(_Stretch(list(wanted[i:j]), list(actual[k:m])))
    moved = _out_of_order(_take_moved(stretches, matches), wanted, actual, matches)
    differences = [*_take_merged(stretches, matches), *_take_split(stretches)]
    for stretch in stretches:
        differences += _explain(*stretch)
    return Report(tuple(wanted), tuple(actual), (*differences, *moved), tuple(matches))


class _Stretch(NamedTuple):
    """A stretch in which the two sequences do not agree, and what of it is not explained yet."""

    wanted: list[Expected]
    actual: list[CompiledCollective]


def _key_of(item: Expected) -> tuple[object, ...]:
    return (item.kind, item.op, (item.dtype,), item.count, _plain(item.kind, item.groups), 1)


def _key_found(item: CompiledCollective) -> tuple[object, ...]:
    return (item.kind, item.op, item.dtypes, item.count, _plain(item.kind, item.groups), _arrays(item))


def _arrays(item: CompiledCollective) -> int:
    # XLA:CPU writes one all-to-all as one operand per rank, and the arrays of a bucket may be reduced as they
    # are; anything else with several operands was merged.
    return 1 if item.kind == "all_to_all" or item.bucket else len(item.inputs)


def _plain(kind: str, groups: Groups) -> Groups:
    """Groups in a fixed order; within a group the order matters to all but an all-reduce."""
    return tuple(sorted(tuple(sorted(group)) if kind == "all_reduce" else group for group in groups))


def same_ranks(wanted: Expected, actual: CompiledCollective) -> bool:
    """Whether both have the same groups, whatever the order within them."""
    return _plain("all_reduce", wanted.groups) == _plain("all_reduce", actual.groups)


def _share_axis(groups: Groups, others: Groups) -> bool:
    """Whether ranks of one of `groups` meet again in one of `others`."""
    members = [set(group) for group in others]
    return any(len(own & other) > 1 for own in map(set, groups[:1]) for other in members)


def _take_moved(
    stretches: Sequence[_Stretch], matches: list[tuple[Expected, CompiledCollective]]
) -> list[Difference]:
    """What is missing in one place and extra in another was moved. Messages of one plan line were not: slices
    of a chunk program are ordered by their data alone."""
    moved: list[Difference] = []
    for origin in stretches:
        for item in tuple(origin.wanted):
            places = [(s, f) for s in stretches for f in s.actual if _key_found(f) == _key_of(item)]
            if places:
                stretch, actual = places[0]
                origin.wanted.remove(item)
                stretch.actual.remove(actual)
                if (item.kind == "permute" or item.free) and item.scope in actual.scopes:
                    matches.append((item, actual))
                    continue
                text = f"{item} is issued in another place ({actual.name})"
                moved.append(Difference("moved", text, (item,), (actual,)))
    return moved


def _out_of_order(
    moved: Sequence[Difference],
    wanted: Sequence[Expected],
    actual: Sequence[CompiledCollective],
    matches: list[tuple[Expected, CompiledCollective]],
) -> list[Difference]:
    """Those of `moved` that another collective over one of their axes has overtaken, or they it. The others
    are as planned: each axis has an order of its own."""
    pairs = [(item, theirs) for item, theirs in matches if item.kind != "permute" and not item.free]
    pairs += [(move.expected[0], move.found[0]) for move in moved]
    planned, issued = {id(item) for item, _ in pairs}, {id(theirs) for _, theirs in pairs}

    def overtaken(groups: Groups) -> bool:
        mine = [i for i in wanted if id(i) in planned and _share_axis(groups, i.groups)]
        rivals = [f for f in actual if id(f) in issued and _share_axis(groups, f.groups)]
        return list(map(_key_of, mine)) != list(map(_key_found, rivals))

    differences = [move for move in moved if overtaken(move.expected[0].groups)]
    matches += [(m.expected[0], m.found[0]) for m in moved if not any(m is d for d in differences)]
    return differences


def _take_merged(
    stretches: Sequence[_Stretch], matches: list[tuple[Expected, CompiledCollective]]
) -> list[Difference]:
    """Collectives that became one: of several arrays, or of one in which they lie one after another. Those
    that the compiler may join are as planned."""
    merged: list[Difference] = []
    for stretch in stretches:
        for actual in tuple(stretch.actual):
            near = (stretch, *(s for s in stretches if s is not stretch))
            parts = _parts_of(actual, [item for s in near for item in s.wanted])
            # Other sizes belong to other stages; XLA lists the names of what it merges, or drops them all.
            whole = sum(item.count for item in parts) == actual.count
            is_merged = len(parts) > 1 if whole else len(actual.origins) > 1 or not actual.op_name
            if not parts or not (is_merged or _arrays(actual) > 1):
                continue
            stretch.actual.remove(actual)
            for s in stretches:
                s.wanted[:] = [item for item in s.wanted if not any(item is part for part in parts)]
            if all(item.free for item in parts):
                matches += [(item, actual) for item in parts]
                continue
            others = "" if whole else " and others of the step"
            first, *more = parts
            subject = f"{len(parts)} collectives" if more else f"{first}"
            merged.append(Difference("merged", f"{subject}{others} became 1: {actual}", parts, (actual,)))
    return merged


def _parts_of(actual: CompiledCollective, wanted: Sequence[Expected]) -> tuple[Expected, ...]:
    """Those of `wanted` that `actual` is made of, as far as they are planned."""
    sizes = [tensor.size for tensor in actual.inputs] if _arrays(actual) > 1 else [actual.count]
    parts: list[Expected] = []
    for item in wanted:
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


def _take_split(stretches: Sequence[_Stretch]) -> list[Difference]:
    """All-reduces that became a reduce-scatter and an all-gather."""
    split: list[Difference] = []
    for wanted, actual in stretches:
        for item in tuple(wanted):
            near = {
                collective.kind: collective for collective in reversed(actual) if same_ranks(item, collective)
            }
            parts = tuple(near[kind] for kind in ("reduce_scatter", "all_gather") if kind in near)
            if item.kind != "all_reduce" or "all_reduce" in near or len(parts) < 2:
                continue
            wanted.remove(item)
            actual[:] = [collective for collective in actual if collective not in parts]
            text = f"{item} became {len(parts)}: {'; '.join(map(str, parts))}"
            split.append(Difference("split", text, (item,), parts))
    return split


def _explain(wanted: Sequence[Expected], actual: Sequence[CompiledCollective]) -> list[Difference]:
    """Differences of one stretch that is neither merged nor split."""
    if len(wanted) == len(actual):
        pairs = zip(wanted, actual, strict=True)
        if all(w.kind == f.kind for w, f in pairs):
            return [_changed(w, f) for w, f in zip(wanted, actual, strict=True)]
    differences: list[Difference] = []
    rest = list(actual)
    for item in wanted:
        same = (match for match in rest if match.kind == item.kind and item.scope in match.scopes)
        match = next(same, None)
        if match is None:
            differences.append(Difference("missing", f"{item}", (item,)))
            continue
        rest.remove(match)
        differences.append(_changed(item, match))
    return differences + [Difference("extra", f"{item} ({item.name})", (), (item,)) for item in rest]


def _changed(wanted: Expected, actual: CompiledCollective) -> Difference:
    changes = ", ".join(
        f"{name} {_short(f)} instead of {_short(w)}" for name, w, f in changed(wanted, actual)
    )
    return Difference("changed", f"{wanted}: {changes}", (wanted,), (actual,))


def changed(wanted: Expected, actual: CompiledCollective) -> list[tuple[str, object, object]]:
    """What differs between two: its name, as expected, as found."""
    names = ("kind", "operation", "dtype", "elements", "groups", "arrays")
    pairs = zip(names, _key_of(wanted), _key_found(actual), strict=True)
    return [(name, w, f) for name, w, f in pairs if w != f]


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return text if len(text) <= 60 else f"{text[:60]}..."
