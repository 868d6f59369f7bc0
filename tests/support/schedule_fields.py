"""Mutants of schedules that change several fields together, so that they may agree with each other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from commplan.ir import roles
from commplan.ir import schedule as ir
from commplan.ir.plan import Plan
from commplan.ir.roles import Role

from .schedule_mutation import Edit

Path = tuple[str | int, ...]


class Spot(NamedTuple):
    """A field of a schedule, or an item of a tuple in a field. label: its struct and its name."""

    path: Path
    label: str
    value: Any


def spots(node: Any, path: Path = ()) -> Iterator[Spot]:
    """The fields that runtimes read, at any depth. The plan is left out: the schedule has its digest."""
    for field in roles.fields(type(node)):
        if field.role in (Role.PRESENTATION, Role.COST):
            continue
        value, place = getattr(node, field.name), (*path, field.name)
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, item in items:
            inner = place if index is None else (*place, index)
            if isinstance(item, msgspec.Struct):
                if not isinstance(item, Plan):
                    yield from spots(item, inner)
            else:
                yield Spot(inner, f"{type(node).__name__}.{field.name}", item)


def put(node: Any, path: Path, value: Any) -> Any:
    """`node` with `value` at `path`."""
    if not path:
        return value
    head, remainder = path[0], path[1:]
    if isinstance(head, int):
        return (*node[:head], put(node[head], remainder, value), *node[head + 1 :])
    return msgspec.structs.replace(node, **{head: put(getattr(node, head), remainder, value)})


def joint_edit(schedule: ir.Schedule, rng: random.Random) -> Edit | None:
    """Draw an edit of one of the kinds below; None if the schedule has too few fields for it."""
    fields = list(spots(schedule))
    draw = rng.choice((_renamed, _compensated, _exchanged, _everywhere))
    try:
        kind, values = draw(fields, rng)
    except (IndexError, ValueError, TypeError, ZeroDivisionError):
        return None
    changed: Any = schedule
    for path, value in values.items():
        changed = put(changed, path, value)
    text = "; ".join(f"{'.'.join(map(str, path))}: {value!r:.60}" for path, value in list(values.items())[:4])
    return Edit(kind, f"{len(values)} fields: {text}", 0, None, lambda: changed)


def _renamed(fields: list[Spot], rng: random.Random) -> tuple[str, dict[Path, Any]]:
    """Two names exchanged in all fields."""
    texts = [spot for spot in fields if type(spot.value) is str and spot.value]
    old, new = rng.sample(sorted({spot.value for spot in texts}), 2)
    names = {old: new, new: old}
    return "renamed", {spot.path: names[spot.value] for spot in texts if spot.value in names}


def _compensated(fields: list[Spot], rng: random.Random) -> tuple[str, dict[Path, Any]]:
    """Two numbers changed so that their product, or their sum, stays the same."""
    numbers = [spot for spot in fields if type(spot.value) in (int, float)]
    number = rng.choice(numbers)
    near = [spot for spot in numbers if spot.path != number.path and spot.path[:4] == number.path[:4]]
    other, by = rng.choice(near), rng.choice((2, 3, 4, 2**10))
    if rng.random() < 0.5:
        pair = number.value * by, type(other.value)(other.value / by)
    else:
        pair = number.value + by, other.value - by
    return "compensated", {number.path: pair[0], other.path: pair[1]}


def _exchanged(fields: list[Spot], rng: random.Random) -> tuple[str, dict[Path, Any]]:
    """The values of two spots of one field exchanged."""
    label = rng.choice(sorted({spot.label for spot in fields}))
    first, second = rng.sample([spot for spot in fields if spot.label == label], 2)
    return "values exchanged", {first.path: second.value, second.path: first.value}


def _everywhere(fields: list[Spot], rng: random.Random) -> tuple[str, dict[Path, Any]]:
    """One value of a field replaced by another of its values, wherever it is."""
    label = rng.choice(sorted({spot.label for spot in fields}))
    alike = [spot for spot in fields if spot.label == label]
    old, new = rng.sample(sorted({spot.value for spot in alike}), 2)
    return "replaced everywhere", {spot.path: new for spot in alike if spot.value == old}
