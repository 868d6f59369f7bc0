"""The description of a compiled step, and tables of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commplan.lowering.audit import Machine, audit_text, least_exposed
from commplan.lowering.gpu.estimate import estimate

HEAD = ("collectives", "instructions", "MB", "memory MB", "step ms", "waiting ms", "at least")


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


def row(name: tuple[str, str, str], text: str, memory: int, machine: Machine) -> Row:
    """The row of a step with this compiled `text`, which needs `memory` bytes."""
    step = audit_text(text)
    guess = estimate(step, machine)
    nbytes = sum(collective.nbytes * step.trips(collective) for collective in step.collectives)
    counts = (len(step.collectives), sum(n for _, n in step.ops), nbytes)
    return Row(*name, *counts, memory, guess.total, guess.exposed, least_exposed(text, machine))


def cells(row: Row) -> list[str]:
    sizes = [f"{nbytes / 1e6:.0f}" for nbytes in (row.nbytes, row.memory)]
    times = [f"{seconds * 1e3:.2f}" for seconds in (row.seconds, row.exposed, row.least)]
    return [str(row.collectives), str(row.instructions), *sizes, *times]


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    """XLA alone, the best of its settings by the time of the step, and the plan."""
    alone = [row for row in rows if row.way.startswith("XLA alone")]
    yield from alone[:1]
    if alone[1:]:
        yield min(alone[1:], key=lambda row: (row.seconds, row.instructions))
    yield from (row for row in rows if row not in alone)
