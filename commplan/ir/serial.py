"""Schedules as canonical JSON, and digests that are the same on every machine."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import msgspec

from commplan.ir.plan import Plan
from commplan.ir.schedule import Schedule

_PLACES = ("span", "file")  # where something was written is no part of what it is


def plan_digest(plan: Plan) -> str:
    """sha256, in hex, of what `plan` says; places in the text and the file's name are no part of it."""
    return _digest(plan)


def schedule_digest(schedule: Schedule) -> str:
    """sha256, in hex, of `schedule`; places in the text and the file's name are no part of it."""
    return _digest(schedule)


def _digest(value: msgspec.Struct) -> str:
    plain = _without_places(msgspec.to_builtins(value))
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _without_places(item) for key, item in items if key not in _PLACES}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in cast("list[Any]", value)]
    return value
