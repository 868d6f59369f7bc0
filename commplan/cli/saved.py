"""Schedules that `compile -o` saved, in either of its forms: JSON, which programs load, and text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commplan.diagnostics import fail_if

if TYPE_CHECKING:
    from commplan.ir.schedule import Schedule
    from commplan.ir.serialization import Verifier


def is_saved(path: str, text: str) -> bool:
    """Whether a file holds a schedule and no plan."""
    return path.endswith(".json") or text.lstrip().startswith("{") or _is_text(text)


def read_saved(text: str, name: str, verify: Verifier) -> Schedule:
    """The schedule in `text`. Raises CommplanError: what `decode` and `parse_saved` raise, what `verify`
    finds, and CP1004 where it is not what was compiled."""
    from commplan.ir.migration import OLD, retyped
    from commplan.ir.serialization import compare_digest, decode
    from commplan.ir.text import parse_saved

    if not _is_text(text):
        return decode(text.encode(), name, verify)
    written, digest, schema = parse_saved(text.replace("\r\n", "\n"), name)
    schedule = retyped(written) if schema == OLD else written
    fail_if(verify(schedule))
    compare_digest(written, digest, name, schema)
    return schedule


def _is_text(text: str) -> bool:
    return text.lstrip().partition("\n")[0].rstrip() == "schedule"
