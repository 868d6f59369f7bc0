"""Compares the predictions of one plan on several machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from commplan.cost import Prediction
from commplan.cost.schedule.prediction import PhaseTime
from commplan.explain.times import MEASURES
from commplan.ir.types import sized, timed

Row = tuple[str, tuple[str, ...]]
"""The name of a measure, and its value on each machine."""


def rows(predictions: Sequence[Prediction], phase: str) -> Iterator[Row]:
    """The measures of one phase, under the names of `PhaseTime`, with one value per machine."""
    times = [prediction.phase(phase) for prediction in predictions]
    for title, measure in MEASURES.items():
        seconds: list[float] = [getattr(time, measure) for time in times]
        if any(seconds):
            first = seconds[0]
            yield title, tuple(timed(value) + _compared(value, first) for value in seconds)
    for level in dict.fromkeys(level for time in times for level, nbytes in time.nbytes if nbytes):
        moved = (dict(time.nbytes).get(level, 0) for time in times)
        yield f"link of {level}", tuple(sized(nbytes) if nbytes else "-" for nbytes in moved)
    yield "collectives", tuple(map(_collectives, times))


def _compared(seconds: float, first: float) -> str:
    return f" ({seconds / first:.3g}x)" if first and seconds != first else ""


def _collectives(time: PhaseTime) -> str:
    """The number of collectives of each kind and algorithm."""
    counts = Counter(f"{op.op} via {op.algorithm}" for op in time.ops if op.algorithm)
    return "\n".join(f"{count} x {name}" for name, count in counts.items()) or "none"
