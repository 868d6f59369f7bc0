"""What is said of a compiled step, and of several beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commplan.lowering.audit import Machine, audit_text, estimate, least_exposed
from commplan.lowering.audit.orders import best_order

HEAD = ("collectives", "instructions", "MB", "memory MB", "step ms", "waiting ms", "at least", "an order")


class Row(NamedTuple):
    """A step as it was compiled. Bytes and seconds."""

    model: str
    target: str
    way: str
    collectives: int
    instructions: int
    nbytes: int
    memory: int
    seconds: float
    exposed: float
    least: float
    order: float | None


def row(
    name: tuple[str, str, str], text: str, memory: int, machine: Machine, tries: int | None = None
) -> Row:
    """The row of a step with this compiled `text`, which needs `memory` bytes.

    tries: of looking for a better order of its instructions; None: none is looked for."""
    step = audit_text(text)
    guess = estimate(step, machine)
    nbytes = sum(collective.nbytes * step.trips(collective) for collective in step.collectives)
    counts = (len(step.collectives), sum(n for _, n in step.ops), nbytes)
    order = None if tries is None else best_order(text, machine, tries).exposed
    return Row(*name, *counts, memory, guess.total, guess.exposed, least_exposed(text, machine), order)


def cells(row: Row) -> list[str]:
    sizes = [f"{nbytes / 1e6:.0f}" for nbytes in (row.nbytes, row.memory)]
    times = [f"{seconds * 1e3:.2f}" for seconds in (row.seconds, row.exposed, row.least)]
    order = "" if row.order is None else f"{row.order * 1e3:.2f}"
    return [str(row.collectives), str(row.instructions), *sizes, *times, order]


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    """XLA alone, the best of its settings by the time of the step, and what plans make of it."""
    alone = [row for row in rows if row.way.startswith("XLA alone")]
    yield from alone[:1]
    if alone[1:]:
        yield min(alone[1:], key=lambda row: (row.seconds, row.instructions))
    yield from (row for row in rows if row not in alone)
