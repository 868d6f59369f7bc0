"""The text form of both graphs: one op per line, with its results on the left.

The form is derived from the structs, so new ops and fields need no code here. A line is `results = op
field=value .. @place`; fields with default values are omitted. Special notations: a place `@1:2-3:4`, a type
`f32[3, 4]`, a placement `<per a; split b>`, a leaf `"w/b": f32[3]`, and an algorithm `hierarchical(gpu,
node)`, quoted if it is not a plain word. `# ` begins a comment.
"""

from __future__ import annotations

from typing import Any

import msgspec

from commplan.diagnostics import Span, fail
from commplan.ir.plan import Plan
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import check_schema, schedule_digest
from commplan.ir.serialization.text_syntax import Reader, TextError, write_struct

_DIGEST = "# digest "


def print_plan(plan: Plan) -> str:
    """`plan` as text, which `parse_plan` reads back to an equal plan."""
    return _print("plan_graph", plan)


def parse_plan(text: str, file: str = "<text>") -> Plan:
    """Parse the result of `print_plan`. Raises CP1008 with line and column for other text."""
    return _parse("plan_graph", text, Plan, file)


def print_schedule(schedule: Schedule) -> str:
    """`schedule` as text, which `parse_schedule` reads back to an equal schedule."""
    return _print("schedule", schedule)


def parse_schedule(text: str, file: str = "<text>") -> Schedule:
    """Parse the result of `print_schedule`. Raises CP1008 with line and column for other text."""
    return _parse("schedule", text, Schedule, file)


def print_saved(schedule: Schedule) -> str:
    """The result of `print_schedule`, followed by the digest."""
    return f"{print_schedule(schedule)}{_DIGEST}{schedule_digest(schedule)}\n"


def parse_saved(text: str, file: str = "<text>") -> tuple[Schedule, str | None]:
    """Parse the result of `print_saved` into the schedule and its digest, or None without one.

    Raises as `parse_schedule` does, and CP1002 for another schema version.
    """
    last = text.rstrip().rpartition("\n")[2]
    digest = last.removeprefix(_DIGEST).strip() if last.startswith(_DIGEST) else None
    schedule = parse_schedule(text, file)
    check_schema(schedule.schema, file)
    return schedule, digest


def _print(word: str, value: msgspec.Struct) -> str:
    return "\n".join([word, *write_struct(value, 1)]) + "\n"


def _parse(word: str, text: str, kind: type[Any], file: str) -> Any:
    """Parse a text into a struct of `kind`."""
    try:
        reader = Reader(text)
        reader.word(word)
        return msgspec.convert(reader.plain(), kind)
    except msgspec.ValidationError as error:
        return fail("CP1008", str(error), span=Span(1, 1, 1, 2), file=file)
    except (RecursionError, ValueError) as error:  # nested too deeply, a number too long, a wrong escape
        return fail("CP1008", f"this is not the text form of a graph: {error}", file=file)
    except TextError as error:
        return fail("CP1008", str(error), span=error.span, file=file)
