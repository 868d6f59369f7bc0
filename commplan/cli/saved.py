"""Schedules that `compile -o` saved, in either of its forms: JSON, which programs load, and text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commplan.diagnostics import CommplanError

if TYPE_CHECKING:
    from commplan.ir.schedule import Schedule
    from commplan.ir.serial import Verifier


def is_saved(path: str, text: str) -> bool:
    """Whether a file holds a schedule and no plan."""
    return path.endswith(".json") or text.lstrip().startswith(("{", "schedule\n"))


def read_saved(text: str, name: str, verify: Verifier) -> Schedule:
    """The schedule in `text`. Raises CommplanError: what `decode` and `parse_schedule` raise, and what
    `verify` finds."""
    from commplan.ir.serial import decode
    from commplan.ir.text import parse_schedule

    if not text.lstrip().startswith("schedule\n"):
        return decode(text.encode(), name, verify)
    schedule = parse_schedule(text, name)
    if problems := verify(schedule):
        raise CommplanError(*problems)
    return schedule
