"""The text form of both graphs: one op per line, with its results on the left.

The form is derived from the structs, so new ops and fields need no code here. A line is `results = op
field=value .. @place`; fields with default values are omitted, except `schema`. Special notations:

    @1:2-3:4                    a source position
    f32[3, 4]                   the type of an array
    "w/b": f32[3]               a leaf
    <per a; split b>            a placement
    grads.1#0[8:4]->16          a part: leaf 0 from element 8 on, 4 elements, at offset 16 of a buffer
    algorithm(name=ring)        any other struct

Texts are quoted if they are not plain words. `# ` begins a comment.
"""

from __future__ import annotations

from typing import Any

import msgspec

from commplan.diagnostics import Span, fail
from commplan.ir.plan import Plan
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import check_schema, schedule_digest
from commplan.ir.serialization.text_syntax import Reader, TextError, write_struct

# The beginning of the last line of a saved schedule.
_DIGEST = "# digest "


def print_plan(plan: Plan) -> str:
    """`plan` as text, which `parse_plan` reads back to an equal plan."""
    return _print("plan_graph", plan)


def parse_plan(text: str, file: str = "<text>") -> Plan:
    """Parse the result of `print_plan`.

    Raises:
        CommplanError: CP1008 for other text, with the position of a syntax error.
    """
    return _parse("plan_graph", text, Plan, file)


def print_schedule(schedule: Schedule) -> str:
    """`schedule` as text, which `parse_schedule` reads back to an equal schedule."""
    return _print("schedule", schedule)


def parse_schedule(text: str, file: str = "<text>") -> Schedule:
    """Parse the result of `print_schedule`.

    Raises:
        CommplanError: CP1008 for other text, with the position of a syntax error.
    """
    return _parse("schedule", text, Schedule, file)


def print_saved(schedule: Schedule) -> str:
    """The result of `print_schedule`, followed by the digest."""
    return f"{print_schedule(schedule)}{_DIGEST}{schedule_digest(schedule)}\n"


def parse_saved(text: str, file: str = "<text>") -> tuple[Schedule, str | None]:
    """Parse the result of `print_saved`. The digest is not compared.

    Returns:
        The schedule, and the digest in the last line; None if that line has none.

    Raises:
        CommplanError: CP1008 as `parse_schedule`, or CP1002 for another schema version.
    """
    last = text.rstrip().rpartition("\n")[2]
    digest = last.removeprefix(_DIGEST).strip() if last.startswith(_DIGEST) else None
    schedule = parse_schedule(text, file)
    check_schema(schedule.schema, file)
    return schedule, digest


def _print(word: str, value: msgspec.Struct) -> str:
    """The text form of `value`: `word` on the first line, then one field per line or block."""
    return "\n".join([word, *write_struct(value, 1)]) + "\n"


def _parse(word: str, text: str, kind: type[Any], file: str) -> Any:
    """Parse the text form of a struct of type `kind`, which begins with `word`. Raises CP1008."""
    try:
        reader = Reader(text)
        reader.word(word)
        return msgspec.convert(reader.plain(), kind)
    except msgspec.ValidationError as error:  # its message has the path of the field, but no position
        return fail("CP1008", str(error), span=Span(1, 1, 1, 2), file=file)
    except (RecursionError, ValueError) as error:  # nested too deeply, a number too long, a wrong escape
        return fail("CP1008", f"this is not the text form of a graph: {error}", file=file)
    except TextError as error:
        return fail("CP1008", str(error), span=error.span, file=file)
