"""The playground's entry point in the browser: takes the text of a plan, returns everything to show."""

from __future__ import annotations

import time
from typing import Any

import assumed
import msgspec
import numpy

from commplan import Plan, dsl
from commplan.diagnostics import CommplanError
from commplan.dsl.format import format_source
from commplan.explain.report import explain_plan
from commplan.ir import plan as graph
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.text import print_schedule
from commplan.report.document import Proofs, ReportDocument
from commplan.report.gather import Recorded, gather
from commplan.report.graph import graphs
from commplan.verify.claims import claims

numpy.loading = False  # modules imported lazily below must not call it either

FILE = "playground.plan"
SCHEDULE = 200_000  # characters that are shown


def look(request: str) -> str:
    """Compile a plan for the playground.

    Args:
        request: JSON of `text`, optionally `axes` (sizes by name) and `shapes` (trees by name), and `sample`:
            shapes for the trees that the plan has.

    Returns:
        JSON of `diagnostics`, `formatted` (None if the text does not parse), `assumed` (default sizes and
        trees by name), `document` (that of the report, None if the plan does not compile), `explanation` and
        `schedule` as text, and `seconds` of computation.
    """
    begin = time.perf_counter()
    asked = msgspec.json.decode(request)
    plan, diagnostics = dsl.load(asked["text"], FILE)
    answer: dict[str, Any] = {
        "diagnostics": diagnostics,
        "formatted": _formatted(asked["text"]),
        "graphs": graphs(plan) if plan else (),
    }
    if plan is not None:
        answer |= _compiled(plan, asked)
    return msgspec.json.encode(answer | {"seconds": time.perf_counter() - begin}).decode()


def _formatted(text: str) -> str | None:
    try:
        return format_source(text, FILE)
    except CommplanError:
        return None


def _compiled(plan: graph.Plan, asked: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, int] = assumed.sizes(plan) | (asked.get("axes") or {})
    trees = assumed.shapes(plan)
    known: dict[str, Any] = asked.get("sample") or {}
    trees |= {name: tree for name, tree in known.items() if name in trees} | (asked.get("shapes") or {})
    used = {"axes": sizes, "shapes": trees}
    try:
        schedule = Plan(plan).compile(axes=sizes, shapes=trees).schedule
        document = _document(schedule, asked["text"])
        explanation = explain_plan(plan, schedule).text()
    except CommplanError as error:
        return {"assumed": used, "diagnostics": error.diagnostics}
    except numpy.NeedsNumPyError as error:
        return {"assumed": used, "left_out": str(error)}
    text = print_schedule(schedule)
    return {
        "assumed": used,
        "document": document,
        "explanation": explanation,
        "schedule": text[:SCHEDULE],
        "digest": Plan(plan).digest,
    }


def _document(schedule: Schedule, text: str) -> ReportDocument:
    known = claims(schedule)
    proofs = Proofs(known.proved, known.assumed, known.not_checked, (), ())
    return gather(schedule, text, proofs, None, Recorded())
