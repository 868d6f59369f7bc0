"""Stages in words, for drawings and explanations: close to how they are written, one line a thought."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.input.order import Order
from commplan.ir.hints import NO_HINTS
from commplan.ir.plan import Hints, Load, Phase, Stage, name_of, results
from commplan.ir.schedule import Axis as ScheduledAxis
from commplan.ir.types import sized


def phase_title(phase: Phase) -> str:
    """The header of a phase, as written: `every 4 steps`."""
    match phase.kind:
        case "start":
            return "at start"
        case "step":
            return "each step"
        case "every":
            return f"every {phase.period} steps"
        case "named":
            return f"phase {phase.name}"


def stage_lines(stage: Stage) -> tuple[str, ...]:
    """What `stage` does, then where, then how, then its hints: one string each, empty ones left out."""
    lines = (*stage.summary(), *_how(stage))
    return tuple(line for line in lines if line)


def stage_text(stage: Stage) -> str:
    """`stage` on one line, close to how it is written: `grads = reduce grads over data by mean`."""
    names = ", ".join(name_of(ref) for ref in results(stage))
    parts = (names, "=", *stage.written(), *_how(stage))
    return " ".join(part for part in parts if part)


def _how(stage: Stage) -> tuple[str, ...]:
    via = getattr(stage, "via", None)
    return (f"via {via}" if via else "", hints_text(getattr(stage, "hints", NO_HINTS)))


def filler_lines(stage: Load, records: int | None) -> tuple[str, ...]:
    """How many rows of an epoch only fill the last batch of a load, for each size of its batches.

    records: of its source; None if that is not known.
    """
    orders = [Order(records or 1, batch, 0, stage.visit, stage.tail) for batch in dict.fromkeys(stage.batch)]
    lines: list[str] = []
    for order in (order for order in orders if order.filler):
        rows, batch = order.steps * order.batch, order.batch
        some = f"{order.filler:,} of {rows:,} rows of an epoch in batches of {batch}"
        if records is None:
            some = f"up to {batch - 1} rows of the last batch of {batch}"
        lines.append(f"{some} repeat records and do not count: `item.mask` is False there")
    return tuple(lines)


def hints_text(hints: Hints) -> str:
    """`{ bucket = 25 MiB, wire = bf16 }`, or nothing where there are none."""
    given = [
        f"{field} = {sized(value) if field in ('bucket', 'chunk') else value}"
        for field in Hints.__struct_fields__
        if (value := getattr(hints, field)) is not None
    ]
    return f"{{ {', '.join(given)} }}" if given else ""


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` with their cells in columns, the first row among them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]


def levels_text(axis: ScheduledAxis) -> str:
    """`host x 4, rack x 2`: the levels that an axis is spread over, innermost first; one level by name."""
    if len(axis.levels) == 1:
        return axis.levels[0].level
    return ", ".join(f"{spread.level} x {spread.count}" for spread in axis.levels)
