"""Schedules as canonical JSON, and digests that are the same on every machine.

A file is one JSON object: `format`, `schema`, `digest` (of the schedule) and `schedule`. Keys stand in a
fixed order and nothing in it depends on hashing, so that equal schedules give equal bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from commplan import io
from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.plan import Plan
from commplan.ir.schedule import SCHEMA_VERSION, Schedule

FORMAT = "commplan-schedule"
# Where something was written, and the topology that it was compiled for, are no part of what it is: members
# `span`, `file` and `topology`, which is flat once its `span` is gone. Each goes with one comma, which most
# have behind them. In a JSON text a quote inside a string has a backslash before it, so that `"span":` is
# always a key. Every pattern begins with literal text, which makes it fast.
_PLACES = [
    re.compile(rb'%b"%b":(?:\{[^{}]*\}|null|"(?:[^"\\]|\\.)*")%b' % (before, key, behind))
    for key in (b"span", b"file", b"topology")
    for before, behind in ((b"", b","), (b",", b""), (b"", b""))
]

Verifier = Callable[[Schedule], tuple[Diagnostic, ...]]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    schema: int
    digest: str
    schedule: msgspec.Raw


def plan_digest(plan: Plan) -> str:
    """sha256, in hex, of what `plan` says, without its topology, places in the text and the file's name."""
    return _digest(plan)


def schedule_digest(schedule: Schedule) -> str:
    """sha256, in hex, of `schedule`, without its topology, places in the text and the file's name."""
    return _digest(schedule)


def encode(schedule: Schedule) -> bytes:
    """`schedule` as canonical JSON, UTF-8, ending in a newline."""
    digest = schedule_digest(schedule)
    content = {"format": FORMAT, "schema": schedule.schema, "digest": digest, "schedule": schedule}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def decode(data: bytes, file: str = "<schedule>", verify: Verifier | None = None) -> Schedule:
    """The schedule that `encode` wrote. `commplan.verify.load_schedule` proves it sound as well.

    Raises CommplanError: CP1001 (no such file format), CP1002 (another schema version), CP1003 (a
    field is wrong or unknown; its path is in the message), CP1005 (`verify` finds that the schedule
    contradicts itself), CP1004 (it was changed after it was compiled).
    """
    try:
        head = io.decode_json(data, _File)
    except ValueError as error:
        fix = "write one with `commplan compile -o NAME.json`"
        if data.lstrip().startswith(b"schedule"):
            fix = f"this is the text form, which `verify` and `simulate` read; programs load JSON: {fix}"
        fail("CP1001", "this is no schedule file", str(error), fix, file=file)
    if head.format != FORMAT:
        fail("CP1001", f"this is a `{head.format}` file, not a `{FORMAT}`", file=file)
    check_schema(head.schema, file)
    schedule = _schedule(head, file)
    problems = verify(schedule) if verify is not None else ()
    if problems:
        notes = tuple(Note(f"{problem.code}: {problem.message}", problem.span) for problem in problems)
        message = f"the schedule contradicts itself: {problems[0].message}"
        raise CommplanError(Diagnostic("CP1005", message, problems[0].span, notes, file=file))
    compare_digest(schedule, head.digest, file)
    return schedule


def check_schema(schema: Any, file: str) -> None:
    """Raises CP1002 for any version of the form but this commplan's own."""
    if schema != SCHEMA_VERSION:
        message = f"the file has schema version {schema}, this commplan reads {SCHEMA_VERSION}"
        fail("CP1002", message, "compile the plan again", file=file)


def compare_digest(schedule: Schedule, recorded: str | None, file: str) -> None:
    """Raises CP1004 where `recorded`, the digest in a file, is not that of what the file says, and CP1003
    where the file lacks the plan."""
    if schedule.origin is None:
        fail("CP1003", "a field of the schedule is wrong: `origin`, its plan, is missing", file=file)
    digest = schedule_digest(schedule)
    if digest == recorded:
        return
    message, written = "the schedule was changed after it was compiled", f"the file says {recorded}"
    if not recorded:
        message = "the schedule has no digest"
        written = "it ends with one, in the line `# digest ..`, when it is compiled"
    fail("CP1004", message, f"its digest is {digest}", written, "compile the plan again", file=file)


def is_of(schedule: Schedule, plan: Plan) -> bool:
    """Whether `schedule` was compiled from `plan`."""
    return schedule.plan_digest == plan_digest(plan)


def _schedule(head: _File, file: str) -> Schedule:
    try:
        plain: Any = io.decode_json(head.schedule, Any)
        schedule = msgspec.convert(plain, Schedule)
        # Unknown fields are not decoded: what comes back must be all that was there.
        known = msgspec.json.decode(msgspec.json.encode(schedule))
    except OverflowError:  # JSON has no limit, and what is written has
        fail("CP1003", "a field of the schedule is wrong: an integer of more than 64 bits", file=file)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        fail("CP1003", f"a field of the schedule is wrong: {error}", file=file)
    unknown = None if plain == known else _difference(plain, known, "$")
    if unknown is not None:
        fail("CP1003", f"a field of the schedule is wrong: {unknown}", file=file)
    return schedule


def _difference(plain: Any, known: Any, path: str) -> str | None:
    """The first thing in `plain` that is not in `known`, which was decoded from it."""
    if isinstance(plain, dict) and isinstance(known, dict):
        ours, theirs = cast("dict[str, Any]", known), cast("dict[str, Any]", plain)
        for key, item in theirs.items():
            if key not in ours:
                return f"Object contains unknown field `{key}` - at `{path}`"
            inner = _difference(item, ours[key], f"{path}.{key}")
            if inner is not None:
                return inner
        return None
    if isinstance(plain, list) and isinstance(known, list):
        pairs = zip(cast("list[Any]", plain), cast("list[Any]", known), strict=True)
        inner = (_difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(pairs))
        return next((text for text in inner if text is not None), None)
    return None


def _digest(value: msgspec.Struct) -> str:
    """sha256 of the canonical JSON: keys sorted, without the members that say where something was written."""
    text = msgspec.json.encode(value, order="sorted")
    for place in _PLACES:
        text = place.sub(b"", text)
    return hashlib.sha256(text).hexdigest()
