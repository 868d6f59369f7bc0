"""Texts of predicted times, with the same names everywhere, and comparisons of several machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from commplan.cost.schedule.prediction import PhaseTime, Prediction
from commplan.ir.types import sized, timed

_MEASURES = {  # for each title, the field of `PhaseTime` in seconds
    "exposed": "exposed", "computation": "computation", "after": "after", "in all": "seconds",
    "alone": "alone", "bound": "bound",
}  # fmt: skip
Row = tuple[str, tuple[str, ...]]
"""The name of a measure, and its value on each machine."""


def basis(prediction: Prediction) -> str:
    """The source of the costs, and the computation that is included, as one sentence."""
    return f"{prediction.source}; computation {prediction.step}"


def phase_times(phase: PhaseTime) -> list[str]:
    """The times of a phase, one per line: exposed next to the computation if there is one, and alone."""
    bound = f"; {phase.distance:.2f} times its lower bound, {timed(phase.bound)}" if phase.bound > 0 else ""
    lines = [f"alone {timed(phase.alone)}{bound}"]
    if phase.computation:
        after = f" and {timed(phase.after)} after it" if phase.after else ""
        computation = (
            f"exposed {timed(phase.exposed)}, next to {timed(phase.computation)} of computation{after}"
        )
        lines.insert(0, computation)
    return lines


def compared(ratio: float) -> str:
    """The ratio of two times as text: `20% longer`, `3 times as long`."""
    if abs(ratio - 1) < 0.005:
        return "as long"
    if ratio >= 2:
        return f"{ratio:.3g} times as long"
    return f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'less'}"


def rows(predictions: Sequence[Prediction], phase: str) -> Iterator[Row]:
    """The measures of one phase, with one value per machine; `phase` must be in all predictions.

    Times that are 0 on all machines are omitted. Values after the first have the ratio to the first.
    """
    times = [prediction.phase(phase) for prediction in predictions]
    for title, measure in _MEASURES.items():
        seconds: list[float] = [getattr(time, measure) for time in times]
        if any(seconds):
            first = seconds[0]
            yield title, tuple(timed(value) + _relative(value, first) for value in seconds)
    for level in dict.fromkeys(level for time in times for level, nbytes in time.nbytes if nbytes):
        moved = (dict(time.nbytes).get(level, 0) for time in times)
        yield f"link of {level}", tuple(sized(nbytes) if nbytes else "-" for nbytes in moved)
    yield "collectives", tuple(map(_collectives, times))


def _relative(seconds: float, first: float) -> str:
    """The ratio to the first value; empty if they are equal, or if the first is 0."""
    return f" ({seconds / first:.3g}x)" if first and seconds != first else ""


def _collectives(time: PhaseTime) -> str:
    """The number of collectives of each kind and algorithm, one per line."""
    counts = Counter(f"{op.op} via {op.algorithm}" for op in time.ops if op.algorithm)
    return "\n".join(f"{count} x {name}" for name, count in counts.items()) or "none"
