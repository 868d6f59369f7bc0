"""Schedules of schema 2, whose ops said in three ways over which axes they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from commplan.ir.schedule import Phase, Schedule
from commplan.ir.transfer import ValueTypes

_OVER = ("broadcast", "elastic", "exchange", "reduce", "share")
_OVER_ONE = ("gather", "scatter", "slice")
_NEW = ("origin", "state_shards")
OLD = 2


def upgraded(plain: Any) -> Any:
    """The plain values of a schedule or plan of schema 2 as schema 3 has them: `over`, or `axis` and `minor`,
    become `axes`. What has another form than schema 2 is left as it is, for the reader to refuse."""
    return _rewritten(plain, _newer)


def _rewritten(plain: Any, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`plain` with `rewrite` applied to its dicts, the inner ones first."""
    if isinstance(plain, list | tuple):
        return [_rewritten(item, rewrite) for item in cast("list[Any]", plain)]
    if not isinstance(plain, dict):
        return plain
    fields = cast("dict[str, Any]", plain)
    return rewrite({key: _rewritten(item, rewrite) for key, item in fields.items()})


def _newer(fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get("type")
    if kind in _OVER + _OVER_ONE and "over" in fields and "axes" not in fields:
        over = fields.pop("over")
        fields["axes"] = [over] if isinstance(over, str) else over
    elif kind == "slice" and "axis" in fields and isinstance(fields.get("minor", []), list):
        fields["axes"] = [fields.pop("axis"), *fields.pop("minor", [])]
    elif fields.get("schema") == OLD:
        fields["schema"] = OLD + 1
    return fields


def retyped(schedule: Schedule) -> Schedule:
    """`schedule` of schema 2, where buffers and pieces that are cut or stacked were called `per`, typed as
    its ops say. One that contradicts itself is left as it is, for the verifier to refuse."""
    phases: list[Phase] = []
    for phase in schedule.phases:
        values = {value.id: value for value in (*schedule.entry, *phase.values)}
        types = ValueTypes(schedule.axes, values, schedule.fn_types, schedule.sources)
        try:
            for op in phase.ops:
                for value in () if any(op.check(types)) else op.transfer(types):
                    if value.kind == "flat" or values[value.id].placement.per != value.placement.per:
                        values[value.id] = types.with_whole(value)
        except (LookupError, ArithmeticError, ValueError):
            return schedule
        own = tuple(values[value.id] for value in phase.values)
        phases.append(msgspec.structs.replace(phase, values=own))
    return msgspec.structs.replace(schedule, phases=tuple(phases))


def downgraded(plain: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a schedule or plan as schema 2 had them: of these its files hold the digest.

    What schemas say beside that since is left out here.
    """
    plain = _rewritten(plain, _without_stacked)
    phases: list[dict[str, Any]] = []
    for phase in plain["phases"]:
        room = "ops" if "ops" in phase else "stages"
        phases.append(phase | {room: [_older(fields, room) for fields in phase[room]]})
    plain = {key: item for key, item in plain.items() if key not in _NEW}
    return plain | {"phases": phases} | ({"schema": OLD} if "schema" in plain else {})


def has_new(schedule: Schedule) -> bool:
    """Whether `schedule`, as it was read, says what `downgraded` leaves out."""
    stacked = any(value.placement.stacked for value in schedule.values.values())
    return stacked or schedule.origin is not None or bool(schedule.state_shards)


def _without_stacked(fields: dict[str, Any]) -> dict[str, Any]:
    """Placements without `stacked`, which schema 2 had no word for."""
    return {key: item for key, item in fields.items() if key != "stacked"}


def _older(fields: dict[str, Any], room: str) -> dict[str, Any]:
    kind, rest = fields["type"], {key: item for key, item in fields.items() if key != "axes"}
    if kind in _OVER:
        return rest | {"over": fields["axes"]}
    if kind == "slice" and room == "ops":
        return rest | {"axis": fields["axes"][0], "minor": fields["axes"][1:]}
    if kind in _OVER_ONE:
        return rest | {"over": fields["axes"][0]}
    return fields
