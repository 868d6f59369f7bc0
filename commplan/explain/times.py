"""Texts of predicted times, with the same names everywhere."""

from __future__ import annotations

from commplan.cost.schedule.prediction import PhaseTime, Prediction
from commplan.ir.types import timed

MEASURES = {  # titles, and the fields of `PhaseTime` in seconds
    "exposed": "exposed", "computation": "computation", "after": "after", "in all": "seconds",
    "alone": "alone", "bound": "bound",
}  # fmt: skip


def basis(prediction: Prediction) -> str:
    """The source of the costs, and the computation that is included."""
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
