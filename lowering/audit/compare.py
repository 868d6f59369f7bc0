"""How the collectives of a compiled step differ from those that a plan asks for."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal

import msgspec

from commplan.lowering.audit.expect import Expected, Groups
from commplan.lowering.audit.step import CompiledStep, Found


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as planned. `field` says what differs where both sides are there."""

    kind: Literal["missing", "extra", "changed", "moved", "merged"]
    text: str
    expected: tuple[Expected, ...] = ()
    found: tuple[Found, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """The outcome of a comparison: `ok` if the compiled step has the plan's collectives and no others."""

    expected: tuple[Expected, ...]
    found: tuple[Found, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            return f"{len(self.found)} collectives, as planned"
        return "\n".join(f"{difference.kind}: {difference.text}" for difference in self.differences)


def compare(wanted: Sequence[Expected], step: CompiledStep, *, scope: str = "") -> Report:
    """Compare what a plan asks for with what a compiled step has.

    `scope`: look only at the collectives whose `op_name` contains it (all of them by default).
    """
    actual = tuple(item for item in step.collectives if scope in item.op_name)
    left, right = [_key_of(item) for item in wanted], [_key_found(item) for item in actual]
    differences: list[Difference] = []
    for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            differences += _explain(tuple(wanted[i:j]), actual[k:m])
    return Report(tuple(wanted), actual, _with_moves(tuple(differences)))


def _key_of(item: Expected) -> tuple[object, ...]:
    return (item.kind, item.op, (item.dtype,), item.count, _plain(item.kind, item.groups), 1)


def _key_found(item: Found) -> tuple[object, ...]:
    # XLA:CPU writes one all-to-all as one operand per rank; anything else with several operands was merged.
    arrays = 1 if item.kind == "all_to_all" else len(item.inputs)
    return (item.kind, item.op, item.dtypes, item.count, _plain(item.kind, item.groups), arrays)


def _plain(kind: str, groups: Groups) -> Groups:
    """Groups in a fixed order; within a group the order matters to all but an all-reduce."""
    return tuple(sorted(tuple(sorted(group)) if kind == "all_reduce" else group for group in groups))


def _explain(wanted: tuple[Expected, ...], actual: tuple[Found, ...]) -> list[Difference]:
    """Differences of one stretch in which the two sequences do not agree."""
    if len(wanted) > len(actual) > 0 and sum(len(item.inputs) for item in actual) == len(wanted):
        text = f"{len(wanted)} collectives became {len(actual)}: {'; '.join(map(str, actual))}"
        return [Difference("merged", text, wanted, actual)]
    if len(wanted) == len(actual):
        pairs = zip(wanted, actual, strict=True)
        if all(w.kind == f.kind for w, f in pairs):
            return [_changed(w, f) for w, f in zip(wanted, actual, strict=True)]
    missing = [Difference("missing", f"{item}", (item,)) for item in wanted]
    return missing + [Difference("extra", f"{item} ({item.name})", (), (item,)) for item in actual]


def _changed(wanted: Expected, actual: Found) -> Difference:
    names = ("kind", "operation", "dtype", "elements", "groups", "arrays")
    pairs = zip(names, _key_of(wanted), _key_found(actual), strict=True)
    changes = ", ".join(f"{name} {_short(f)} instead of {_short(w)}" for name, w, f in pairs if w != f)
    return Difference("changed", f"{wanted}: {changes}", (wanted,), (actual,))


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return text if len(text) <= 60 else f"{text[:60]}..."


def _with_moves(differences: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Call a collective that is missing in one place and extra in another what it is: moved."""
    left = list(differences)
    moved: list[Difference] = []
    for lost in [d for d in differences if d.kind == "missing"]:
        for extra in [d for d in left if d.kind == "extra"]:
            if _key_of(lost.expected[0]) == _key_found(extra.found[0]):
                left.remove(lost)
                left.remove(extra)
                text = f"{lost.expected[0]} is issued in another place ({extra.found[0].name})"
                moved.append(Difference("moved", text, lost.expected, extra.found))
                break
    return (*left, *moved)
