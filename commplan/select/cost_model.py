"""What passes ask about time: how long would this collective take, done so?

The answers come from `commplan.cost`: from measured curves where a calibration has them, else from the
model of the topology. Without a topology nobody answers, and passes go by fixed rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.cost.calibration import Calibration
from commplan.cost.predictor import Predictor
from commplan.ir.ops.base import Work
from commplan.ir.schedule import Axis, Backend
from commplan.topology import Topology


class Prediction(NamedTuple):
    """Seconds, and where the number comes from: a measurement with its date, or the model."""

    seconds: float
    source: str


class Costs:
    """The times of one compilation. It remembers: passes ask for the same buckets again and again."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: dict[Work, Prediction | None] = {}

    @property
    def measured(self) -> bool:
        """Whether a calibration of this machine is behind the times."""
        return self._predictor.measured

    def predict(self, work: Work) -> Prediction | None:
        """None where nothing is known of `work`: an algorithm that does not exist for it."""
        if work not in self._known:
            prediction = self._predictor.query(work)
            self._known[work] = (
                Prediction(prediction.seconds, self._source(prediction.source)) if prediction else None
            )
        return self._known[work]

    def _source(self, source: str) -> str:
        """Where a number comes from, in words: a model is one of a topology, measured or not."""
        if source != "model":
            return source
        calibration, topology = self._predictor.calibration, self._predictor.network.topology
        if calibration is None:
            guess = "" if topology.round is None else "a guess until calibrated: "
            return f"{guess}model of topology `{topology.name}`, nothing measured"
        return f"model of topology `{topology.name}`, its levels measured {calibration.date}"


def costs_for(
    axes: Sequence[Axis],
    topology: Topology | None,
    calibration: Calibration | None,
    backend: Backend,
    places: tuple[int, ...] | None = None,
) -> Costs | None:
    """Who tells times for a mesh of `axes` on `topology`; None where no topology is known."""
    if topology is None:
        return None
    links = calibration.links if calibration is not None else None
    return Costs(Predictor(topology, tuple(axes), calibration=links, backend=backend, places=places))
