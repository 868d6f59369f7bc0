"""Edits of schedules: one or two changed fields, with new values of the type of the old ones."""

from __future__ import annotations

import enum
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

import msgspec

from commplan.ir import roles
from commplan.ir.plan import Plan
from commplan.ir.roles import Role
from commplan.ir.schedule import Cast, Op, Schedule, results
from commplan.ir.types import DType

Path = tuple[str | int, ...]


class Spot(NamedTuple):
    """A field of a schedule, or an item of a tuple in a field. owner, name: the struct and the field. silent:
    its role is cost or presentation."""

    path: Path
    owner: str
    name: str
    kind: Any
    value: Any
    silent: bool = False

    @property
    def label(self) -> str:
        return f"{self.owner}.{self.name}"


class Edit(NamedTuple):
    """A changed schedule. labels: the fields that were changed; words: how."""

    schedule: Schedule
    labels: tuple[str, ...]
    words: str


def spots(node: Any, path: Path = (), *, silent: bool = False) -> Iterator[Spot]:
    """Every field of every struct in `node`, and every item of every tuple.

    The plan is left out: the file has its digest.
    """
    kind = cast("type[msgspec.Struct]", type(node))
    for field in roles.fields(kind):
        value, place = getattr(node, field.name), (*path, field.name)
        owner = kind.__name__
        quiet = silent or field.role in (Role.PRESENTATION, Role.COST)
        yield Spot(place, owner, field.name, field.type, value, quiet)
        several = cast("tuple[Any, ...] | None", value if isinstance(value, tuple) else None)
        items: list[tuple[int | None, Any]] = [(None, value)] if several is None else [*enumerate(several)]
        for index, item in items:
            inner = place if index is None else (*place, index)
            if isinstance(item, msgspec.Struct):
                if not isinstance(item, Plan):
                    yield from spots(item, inner, silent=quiet)
            elif index is not None:
                yield Spot(inner, owner, field.name, field.type, item, quiet)


def put(node: Any, path: Path, value: Any) -> Any:
    """`node` with `value` at `path`."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(head, int):
        return (*node[:head], put(node[head], rest, value), *node[head + 1 :])
    return msgspec.structs.replace(node, **{head: put(getattr(node, head), rest, value)})


class Generator:
    """Edits the schedules in `schedules`. New values of a field are also taken from the other schedules."""

    def __init__(self, schedules: Sequence[Schedule], seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        seen: dict[str, dict[Any, None]] = defaultdict(dict)
        self.fields: list[dict[str, list[Spot]]] = []
        for schedule in schedules:
            by_label: dict[str, list[Spot]] = defaultdict(list)
            for spot in spots(schedule):
                by_label[spot.label].append(spot)
                seen[spot.label][spot.value] = None
            self.fields.append(by_label)
        self.pool = {label: list(values) for label, values in seen.items()}

    def edits(self, schedule: Schedule, number: int) -> Iterator[Edit]:
        """Yield edits of schedule `number` without end. They depend only on the seed and the number."""
        fields, self.random = self.fields[number], random.Random(f"{self.seed} {number}")
        while True:
            try:
                edit = self._edit(schedule, fields)
            except (ValueError, TypeError, ZeroDivisionError, OverflowError, IndexError, AttributeError):
                continue  # the schedule has no such field, or no other value for it
            if edit is not None and edit.schedule != schedule:
                yield edit

    def _edit(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        ways: list[tuple[Callable[..., Edit | None], int]] = [
            (self._one, 10), (self._two, 4), (self._exchanged, 4), (self._cancelling, 3), (self._renamed, 2),
            (self._everywhere, 2), (self._ops, 4), (self._cast, 2),
        ]  # fmt: skip
        way = self.random.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
        return way(schedule, fields)

    def _spot(self, fields: Mapping[str, list[Spot]]) -> Spot:
        """A random spot. The field is drawn first, so that rare fields are drawn as often as others."""
        labels = list(fields)
        label = self.random.choice(labels)
        if fields[label][0].silent and self.random.random() < 0.8:  # drawn less often
            label = self.random.choice([label for label in labels if not fields[label][0].silent])
        return self.random.choice(fields[label])

    def _one(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        spot = self._spot(fields)
        value = self._other(spot, fields)
        return Edit(put(schedule, spot.path, value), (spot.label,), f"{_shown(spot.path)}: {value!r:.120}")

    def _two(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        first = self._one(schedule, fields)
        assert first is not None
        spot = self._spot(fields)
        value = self._other(spot, fields)
        changed = put(first.schedule, spot.path, value)
        return Edit(
            changed, (*first.labels, spot.label), f"{first.words}; {_shown(spot.path)}: {value!r:.120}"
        )

    def _exchanged(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        """Exchange the values of two spots of one field."""
        label = self.random.choice(list(fields))
        left, right = self.random.sample(fields[label], 2)
        if left.path == right.path[: len(left.path)] or right.path == left.path[: len(right.path)]:
            return None
        changed = put(put(schedule, left.path, right.value), right.path, left.value)
        return Edit(changed, (label,), f"exchanged {_shown(left.path)} and {_shown(right.path)}")

    def _cancelling(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        """Change two numbers so that their product, or their sum, stays the same."""
        numbers = [s for spots in fields.values() for s in spots if _is_number(s.value) and not s.silent]
        left = self.random.choice(numbers)
        near = [s for s in numbers if s.path != left.path and s.path[:4] == left.path[:4]]
        right = self.random.choice(near or numbers)
        by = self.random.choice([2, 3, 4, 2**10, 2**20])
        if self.random.random() < 0.5:
            pair = left.value * by, type(right.value)(right.value / by)
        else:
            pair = left.value + by, right.value - by
        changed = put(put(schedule, left.path, pair[0]), right.path, pair[1])
        words = f"{_shown(left.path)}: {pair[0]}; {_shown(right.path)}: {pair[1]}"
        return Edit(changed, (left.label, right.label), words)

    def _renamed(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        """Replace a text in all fields, or exchange two texts."""
        texts = sorted(
            {s.value for spots in fields.values() for s in spots if type(s.value) is str and s.value}
        )
        old, new = self.random.sample(texts, 2)
        both = self.random.random() < 0.6
        if not both and self.random.random() < 0.7:
            new = f"{old}{self.random.choice(['x', '/x', '~'])}" if "." in old else f"{old}x"
        names = {old: new, **({new: old} if both else {})}
        held = [s for spots in fields.values() for s in spots if type(s.value) is str and s.value in names]
        changed: Any = schedule
        for spot in held:
            changed = put(changed, spot.path, names[spot.value])
        labels = tuple(sorted({spot.label for spot in held}))
        return Edit(changed, labels, f"renamed {old} to {new}{' and back' if both else ''}")

    def _everywhere(self, schedule: Schedule, fields: Mapping[str, list[Spot]]) -> Edit | None:
        """Replace one value of a field everywhere, or within one phase or value."""
        spot = self._spot(fields)
        value = self._other(spot, fields)
        depth = self.random.choice([2, 4, 99])
        same = [
            s for s in fields[spot.label] if s.value == spot.value and s.path[:depth] == spot.path[:depth]
        ]
        if self.random.random() < 0.5:  # fields of this name of other structs as well
            named = [s for spots in fields.values() for s in spots if s.name == spot.name]
            same = [s for s in named if s.value == spot.value and s.path[:depth] == spot.path[:depth]]
        changed: Any = schedule
        for other in same:
            changed = put(changed, other.path, value)
        labels = tuple(sorted({other.label for other in same}))
        return Edit(changed, labels, f"{len(same)} x {_shown(spot.path)}: {value!r:.120}")

    def _ops(self, schedule: Schedule, _: Mapping[str, list[Spot]]) -> Edit | None:
        """Leave an op out (its readers read its operand), repeat it, exchange it with another, or move it."""
        place = self.random.randrange(len(schedule.phases))
        phase = schedule.phases[place]
        ops = list(phase.ops)
        at = self.random.randrange(len(ops))
        op, values, words = ops[at], list(phase.values), type(ops[at]).__name__.lower()
        names: dict[str, str] = {}
        match self.random.choice(["out", "twice", "places", "moved"]):
            case "out":
                ops.pop(at)
                outcome = results(op)
                read = [ref for ref in _refs(op) if ref not in outcome]
                names = {ref: self.random.choice(read) for ref in outcome}
                values = [value for value in values if value.id not in outcome]
                words = f"{words} left out"
            case "twice":
                copies = {ref: f"{ref}/again" for ref in results(op)}
                ops.insert(at + 1, _substituted(op, copies))
                values += [msgspec.structs.replace(v, id=copies[v.id]) for v in values if v.id in copies]
                behind = self.random.randrange(at + 2, len(ops) + 1)
                ops[behind:] = [_substituted(later, copies) for later in ops[behind:]]
                words = f"{words} made twice"
            case "places":
                other = self.random.randrange(len(ops))
                ops[at], ops[other] = ops[other], ops[at]
                words = f"{words} and {type(ops[at]).__name__.lower()} changed places"
            case _:
                ops.insert(self.random.randrange(len(ops)), ops.pop(at))
                words = f"{words} moved"
        ops = [_substituted(op, names) for op in ops]
        bindings = {
            key: tuple(_substituted(binding, names) for binding in getattr(phase, key))
            for key in ("outputs", "updates", "takes")
        }
        if self.random.random() < 0.5:  # list the values in the order of the ops that make them
            order = {ref: number for number, op in enumerate(ops) for ref in results(op)}
            values.sort(key=lambda value: order.get(value.id, 0))
        changed = msgspec.structs.replace(phase, ops=tuple(ops), values=tuple(values), **bindings)
        return Edit(put(schedule, ("phases", place), changed), ("Phase.ops",), f"{phase.name}: {words}")

    def _cast(self, schedule: Schedule, _: Mapping[str, list[Spot]]) -> Edit | None:
        """Convert an operand of an op to another type and back."""
        place = self.random.randrange(len(schedule.phases))
        phase = schedule.phases[place]
        at = self.random.randrange(len(phase.ops))
        op = phase.ops[at]
        known = {value.id: value for value in (*schedule.entry, *phase.values)}
        ref = self.random.choice([ref for ref in _refs(op) if ref in known and ref not in results(op)])
        value = known[ref]
        middle = self.random.choice([dtype for dtype in DType if dtype.is_float])
        narrow = tuple(msgspec.structs.replace(leaf, dtype=middle) for leaf in value.leaves)
        added = (
            msgspec.structs.replace(value, id=f"{ref}/there", leaves=narrow),
            msgspec.structs.replace(value, id=f"{ref}/back"),
        )
        casts = (
            Cast(f"{ref}/there", ref, middle, op.span),
            Cast(f"{ref}/back", f"{ref}/there", value.leaves[0].dtype, op.span),
        )
        ops = (*phase.ops[:at], *casts, _substituted(op, {ref: f"{ref}/back"}), *phase.ops[at + 1 :])
        order = {name: number for number, each in enumerate(ops) for name in results(each)}
        values = tuple(sorted((*phase.values, *added), key=lambda value: order.get(value.id, 0)))
        changed = msgspec.structs.replace(phase, ops=ops, values=values)
        words = f"{phase.name}: {ref} to {middle} and back before {type(op).__name__.lower()}"
        return Edit(put(schedule, ("phases", place), changed), ("Cast",), words)

    def _other(self, spot: Spot, fields: Mapping[str, list[Spot]]) -> Any:
        """Another value for a spot, of the type that its field has."""
        pick, value = self.random, spot.value
        near = [s.value for s in fields[spot.label]]
        if pick.random() < 0.3:
            choices = near if pick.random() < 0.5 else self.pool[spot.label]
            return pick.choice([other for other in choices if other != value])
        literals = [
            item for part in _parts(spot.kind) if get_origin(part) is Literal for item in get_args(part)
        ]
        if literals and (value is None or value in literals):
            return pick.choice([item for item in literals if item != value])
        if isinstance(value, bool):
            return not value
        if isinstance(value, enum.Enum):
            return pick.choice([item for item in type(value) if item != value])
        if isinstance(value, int):
            return pick.choice([value + 1, value - 1, value * 2, value // 2, 0, 1, -value, value + 2**31])
        if isinstance(value, float):
            factor = pick.choice([2.0, 0.5, 1 + 2**-20, 1 + 2**-8, -1.0, 0.0, 2.0**20])
            return value * factor
        if isinstance(value, str):
            texts = [s.value for spots in fields.values() for s in spots if type(s.value) is str]
            return pick.choice([f"{value}x", *(text for text in texts if text != value)])
        if isinstance(value, tuple):
            return self._tuple(spot, near)
        return pick.choice([other for other in self.pool[spot.label] if other != value])

    def _tuple(self, spot: Spot, near: Sequence[Any]) -> tuple[Any, ...]:
        pick, items = self.random, list(spot.value)
        match pick.choice(["drop", "twice", "swap", "reverse", "empty", "take", "turn"]):
            case "drop":
                items.pop(pick.randrange(len(items)))
            case "twice":
                items.insert(pick.randrange(len(items) + 1), pick.choice(items))
            case "swap":
                left, right = pick.sample(range(len(items)), 2)
                items[left], items[right] = items[right], items[left]
            case "reverse":
                items.reverse()
            case "empty":
                items.clear()
            case "turn":
                items = [*items[1:], *items[:1]]
            case _:
                known = cast(
                    "list[Any]", [x for x in (*near, *self.pool[spot.label]) if isinstance(x, tuple)]
                )
                others = [item for other in known for item in other]
                items.insert(pick.randrange(len(items) + 1), pick.choice(others))
        return tuple(items)


def _parts(kind: Any) -> list[Any]:
    return [
        kind,
        *(part for inner in get_args(kind) if get_origin(kind) is not Literal for part in _parts(inner)),
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refs(op: Op) -> list[str]:
    """The texts of an op that look like references to values."""
    return [s.value for s in spots(op) if type(s.value) is str and "." in s.value]


def _substituted(node: Any, names: Mapping[str, str]) -> Any:
    for spot in spots(node):
        if type(spot.value) is str and spot.value in names:
            node = put(node, spot.path, names[spot.value])
    return node


def _shown(path: Path) -> str:
    return ".".join(map(str, path))
