"""Distinguish plans from schedules saved by `compile -o`, which are JSON (loadable by programs) or text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from commplan.cli.console import Console, name_of
from commplan.diagnostics import fail, fail_if

if TYPE_CHECKING:
    from commplan.ir.schedule import Schedule
    from commplan.ir.serialization.canonical_json import Verifier

_OBJECT = re.compile(r'\s*\{\s*["}]')  # start of a JSON object
READERS = ("explain", "verify", "simulate", "report", "diff", "audit", "trace --plan")  # verbs for schedules


def is_saved(path: str, text: str) -> bool:
    """Whether the file `path` with the content `text` is a schedule, or other JSON, rather than a plan."""
    return path.endswith(".json") or bool(_OBJECT.match(text)) or _is_text(text)


def plan_text(path: str, console: Console) -> str:
    """Read the text of a plan. Raises CP1010 for a saved schedule or other JSON."""
    text = console.read(path)
    if is_saved(path, text):
        message = f"{name_of(path)} is JSON or a saved schedule: expected a plan"
        fail("CP1010", message, f"saved schedules are read by {', '.join(READERS)} and Program.load")
    return text


def read_saved(text: str, name: str, verify: Verifier) -> Schedule:
    """Parse and verify a saved schedule.

    Args:
        text: the content of the file.
        name: its name, for errors.
        verify: returns the errors of a schedule.

    Raises:
        CommplanError: the errors of `verify`; CP1001 to CP1005 if the file is invalid, including CP1004 if
            the schedule was modified.
    """
    from commplan.ir.serialization.canonical_json import compare_digest, decode
    from commplan.ir.serialization.text import parse_saved

    if not _is_text(text):
        return decode(text.encode(), name, verify)
    schedule, digest = parse_saved(text.replace("\r\n", "\n"), name)
    fail_if(verify(schedule))
    compare_digest(schedule, digest, name)
    return schedule


def _is_text(text: str) -> bool:
    """Whether `text` is a schedule in the text format."""
    return text.lstrip().partition("\n")[0].rstrip() == "schedule"
