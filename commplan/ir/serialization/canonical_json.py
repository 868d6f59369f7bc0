"""Schedules as canonical JSON, with digests that are the same on every machine.

A file is one JSON object with the members `format`, `schema`, `digest` (of the schedule) and `schedule`. Keys
have a fixed order and no content depends on hashing, so equal schedules have equal bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import msgspec

from commplan import io
from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.plan import Plan
from commplan.ir.schedule import SCHEMA_VERSION, Schedule

# The member `format` of a file.
FORMAT = "commplan-schedule"
# Patterns of the members of JSON objects that are not part of a digest: source positions (`span`, `file`) and
# the `topology`, which contains no object once its `span` is removed. Each is removed with one comma, usually
# the one after it. Quotes inside JSON strings are escaped, so `"span":` is always a key. Every pattern begins
# with literal text, which makes the search fast.
_PLACES = [
    re.compile(rb'%b"%b":(?:\{[^{}]*\}|null|"(?:[^"\\]|\\.)*")%b' % (before, key, after))
    for key in (b"span", b"file", b"topology")
    for before, after in ((b"", b","), (b",", b""), (b"", b""))
]

# A function that returns the contradictions in a schedule.
Verifier = Callable[[Schedule], tuple[Diagnostic, ...]]


class _ScheduleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file, whose schedule is not decoded yet."""

    format: str
    schema: int
    digest: str
    schedule: msgspec.Raw


def plan_digest(plan: Plan) -> str:
    """The SHA-256 of `plan` in hex, without its topology, source positions and file name."""
    return _digest(plan)


def schedule_digest(schedule: Schedule) -> str:
    """The SHA-256 of `schedule` in hex, without its topology, source positions and file name."""
    return _digest(schedule)


def encode(schedule: Schedule) -> bytes:
    """`schedule` as canonical JSON in UTF-8, ending in a newline."""
    digest = schedule_digest(schedule)
    content = {"format": FORMAT, "schema": schedule.schema, "digest": digest, "schedule": schedule}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def decode(data: bytes, file: str = "<schedule>", verify: Verifier | None = None) -> Schedule:
    """Decode the result of `encode`. `commplan.verify.load_schedule` also verifies the schedule.

    Args:
        data: The content of the file.
        file: The file name to show in errors.
        verify: A function that returns the contradictions in a schedule; None for no verification.

    Raises:
        CommplanError: CP1001 (not a schedule file), CP1002 (another schema version), CP1003 (a field is
            wrong, unknown, or missing like the plan), CP1005 (`verify` found contradictions) or CP1004 (the
            schedule was changed after compilation).
    """
    try:
        head = io.decode_json(data, _ScheduleFile)
    except ValueError as error:
        fix = "write one with `commplan compile -o NAME.json`"
        if data.lstrip().startswith(b"schedule"):
            fix = f"this is the text form, which `verify` and `simulate` read; programs load JSON: {fix}"
        fail("CP1001", "this is not a schedule file", str(error), fix, file=file)
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
    """Raise CP1002 unless `schema` is the version of this commplan."""
    if schema != SCHEMA_VERSION:
        message = f"the file has schema version {schema}, this commplan reads {SCHEMA_VERSION}"
        fail("CP1002", message, "compile the plan again", file=file)


def compare_digest(schedule: Schedule, recorded: str | None, file: str) -> None:
    """Check that a schedule has the digest of its file.

    Args:
        schedule: The schedule.
        recorded: The digest in the file; None or empty if it has none.
        file: The file name to show in errors.

    Raises:
        CommplanError: CP1003 if the plan of the schedule is missing, or CP1004 if the digest is another one
            or missing.
    """
    if schedule.origin is None:
        fail("CP1003", "a field of the schedule is wrong: `origin`, its plan, is missing", file=file)
    digest = schedule_digest(schedule)
    if digest == recorded:
        return
    message, written = "the schedule was changed after it was compiled", f"the file has {recorded}"
    if not recorded:
        message = "the schedule has no digest"
        written = "it ends with one, in the line `# digest ..`, when it is compiled"
    fail("CP1004", message, f"its digest is {digest}", written, "compile the plan again", file=file)


def is_of(schedule: Schedule, plan: Plan) -> bool:
    """Whether `schedule` was compiled from `plan`."""
    return schedule.plan_digest == plan_digest(plan)


def _schedule(head: _ScheduleFile, file: str) -> Schedule:
    """The schedule in a file. Raises CP1003."""
    try:
        plain: Any = io.decode_json(head.schedule, Any)
        schedule = msgspec.convert(plain, Schedule)
        # Unknown fields are not decoded, so the decoded fields must be all that are in the file.
        decoded = msgspec.json.decode(msgspec.json.encode(schedule))
    except OverflowError:  # JSON integers have no limit, encoded ones have
        fail("CP1003", "a field of the schedule is wrong: an integer of more than 64 bits", file=file)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        fail("CP1003", f"a field of the schedule is wrong: {error}", file=file)
    unknown = None if plain == decoded else _difference(plain, decoded, "$")
    if unknown is not None:
        fail("CP1003", f"a field of the schedule is wrong: {unknown}", file=file)
    return schedule


def _difference(plain: Any, decoded: Any, path: str) -> str | None:
    """The first field in a file that the schedule decoded from it lacks, in words; None if there is none.

    Args:
        plain: A value in the JSON of the file.
        decoded: The same value in the JSON of the schedule decoded from it.
        path: The path of the value, `$` for the whole schedule.
    """
    if isinstance(plain, dict) and isinstance(decoded, dict):
        decoded_fields, encoded = cast("dict[str, Any]", decoded), cast("dict[str, Any]", plain)
        for key, item in encoded.items():
            if key not in decoded_fields:
                return f"Object contains unknown field `{key}` - at `{path}`"
            inner = _difference(item, decoded_fields[key], f"{path}.{key}")
            if inner is not None:
                return inner
        return None
    if isinstance(plain, list) and isinstance(decoded, list):
        items, decoded_items = cast("list[Any]", plain), cast("list[Any]", decoded)
        if len(items) != len(decoded_items):
            return f"Expected `array` of length {len(decoded_items)}, got {len(items)} - at `{path}`"
        pairs = zip(items, decoded_items, strict=True)
        inner = (_difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(pairs))
        return next((text for text in inner if text is not None), None)
    return None


def _digest(value: msgspec.Struct) -> str:
    """The SHA-256 of the JSON of `value` with sorted keys, without topology and source positions."""
    text = msgspec.json.encode(value, order="sorted")
    for place in _PLACES:
        text = place.sub(b"", text)
    return sha256(text)


def sha256(data: bytes) -> str:
    """The SHA-256 of `data` in hex.

    It uses the module of the interpreter itself if there is one, because `hashlib` also loads OpenSSL, half a
    megabyte in every process.
    """
    for module in ("_sha2", "_sha256", "hashlib"):  # `_sha2` since Python 3.12, `_sha256` before
        with contextlib.suppress(ImportError):
            return import_module(module).sha256(data).hexdigest()
    raise ImportError("this Python has no SHA-256")
