"""Texts of stages for drawings and explanations, close to the syntax of plans."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.diagnostics import plural
from commplan.input.order import Order
from commplan.ir.hints import NO_HINTS
from commplan.ir.plan import Hints, Load, Phase, Stage, name_of, results
from commplan.ir.schedule import Axis as ScheduledAxis
from commplan.ir.types import sized


def phase_title(phase: Phase) -> str:
    """The header of a phase as in the plan, such as `every 4 steps`."""
    match phase.kind:
        case "start":
            return "at start"
        case "step":
            return "each step"
        case "every":
            fragments = f" in {phase.fragments} fragments" if phase.fragments > 1 else ""
            hidden = f" hidden under {plural(phase.hidden, 'step')}" if phase.hidden else ""
            return f"every {phase.period} steps{fragments}{hidden}"
        case "named":
            return f"phase {phase.name}"


def stage_lines(stage: Stage) -> tuple[str, ...]:
    """The operation of `stage`, its axes, its algorithm and its hints, one string each."""
    lines = (*stage.summary(), *_algorithm_and_hints(stage))
    return tuple(line for line in lines if line)


def stage_text(stage: Stage) -> str:
    """`stage` on one line, close to the syntax: `grads = reduce grads over data by mean`."""
    names = ", ".join(name_of(ref) for ref in results(stage))
    parts = (names, "=", *stage.source_parts(), *_algorithm_and_hints(stage))
    return " ".join(part for part in parts if part)


def _algorithm_and_hints(stage: Stage) -> tuple[str, ...]:
    """The algorithm and the hints of a stage as text, each empty if there is none."""
    via = getattr(stage, "via", None)
    return (f"via {via}" if via else "", hints_text(getattr(stage, "hints", NO_HINTS)))


def filler_lines(stage: Load, records: int | None) -> tuple[str, ...]:
    """The number of rows of an epoch that only fill the last batch of a load, for each batch size.

    `records` is the number of records of its source; None if it is unknown.
    """
    orders = [Order(records or 1, batch, 0, stage.visit, stage.tail) for batch in dict.fromkeys(stage.batch)]
    lines: list[str] = []
    for order in (order for order in orders if order.filler):
        rows, batch = order.steps * order.batch, order.batch
        rows_text = f"{order.filler:,} of {rows:,} rows of an epoch in batches of {batch}"
        if records is None:
            rows_text = f"up to {batch - 1} rows of the last batch of {batch}"
        lines.append(f"{rows_text} repeat records to fill the batch: `item.mask` is False for them")
    return tuple(lines)


def hints_text(hints: Hints) -> str:
    """Hints as text, such as `{ bucket = 25 MiB, wire = bf16 }`; empty if there are none."""
    fields = [
        f"{'wire' if name == 'codec' else name} = {sized(value) if name in ('bucket', 'chunk') else value}"
        for name in Hints.__struct_fields__
        if (value := getattr(hints, name)) is not None
    ]
    return f"{{ {', '.join(fields)} }}" if fields else ""


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows`, of equal numbers of cells, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]


def levels_text(axis: ScheduledAxis) -> str:
    """The levels that an axis spans, innermost first, such as `host x 4, rack x 2`.

    A single level has only its name.
    """
    if len(axis.levels) == 1:
        return axis.levels[0].level
    return ", ".join(f"{spread.level} x {spread.count}" for spread in axis.levels)
