"""The text form of both graphs: one op a line, results on the left, and the way back.

The form is generic: it is made from the structs themselves, so that a new op or field needs
nothing here. A line is `results = op field=value .. @place`; fields with their default are left
out. Special notations: a place `@1:2-3:4`, a type `f32[3, 4]`, a placement `<per a; split b>`, a leaf
`"w/b": f32[3]`, an algorithm `hierarchical(gpu, node)` (as a quoted text where it is not plain). What
stands behind `# ` is a comment.
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
    """`plan` as text; `parse_plan` reads it back to an equal plan."""
    return _print("plan_graph", plan)


def parse_plan(text: str, file: str = "<text>") -> Plan:
    """The plan that `print_plan` wrote. Raises CP1008 for other text, with line and column."""
    return _parse("plan_graph", text, Plan, file)


def print_schedule(schedule: Schedule) -> str:
    """`schedule` as text; `parse_schedule` reads it back to an equal schedule."""
    return _print("schedule", schedule)


def parse_schedule(text: str, file: str = "<text>") -> Schedule:
    """The schedule that `print_schedule` wrote. Raises CP1008 for other text, with line and column."""
    return _parse("schedule", text, Schedule, file)


def print_saved(schedule: Schedule) -> str:
    """`print_schedule`, and behind it the digest of what it says."""
    return f"{print_schedule(schedule)}{_DIGEST}{schedule_digest(schedule)}\n"


def parse_saved(text: str, file: str = "<text>") -> tuple[Schedule, str | None]:
    """The schedule that `print_saved` wrote, and the digest that stands behind it, if one does. Raises as
    `parse_schedule`, and CP1002 for one of another schema."""
    last = text.rstrip().rpartition("\n")[2]
    digest = last.removeprefix(_DIGEST).strip() if last.startswith(_DIGEST) else None
    schedule = parse_schedule(text, file)
    check_schema(schedule.schema, file)
    return schedule, digest


def _print(word: str, value: msgspec.Struct) -> str:
    return "\n".join([word, *write_struct(value, 1)]) + "\n"


def _parse(word: str, text: str, kind: type[Any], file: str) -> Any:
    """The struct of `kind` that a text says."""
    try:
        reader = Reader(text)
        reader.word(word)
        return msgspec.convert(reader.plain(), kind)
    except msgspec.ValidationError as error:
        return fail("CP1008", str(error), span=Span(1, 1, 1, 2), file=file)
    except (RecursionError, ValueError) as error:  # nested too deeply, a number too long, an odd escape
        return fail("CP1008", f"this is no text form of a graph: {error}", file=file)
    except TextError as error:
        return fail("CP1008", str(error), span=error.span, file=file)
