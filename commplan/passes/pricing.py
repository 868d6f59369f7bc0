"""Predicted times of collectives, from `commplan.simulate`, each asked for once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commplan.ir.schedule import Axis, Backend
from commplan.passes.costs import Ask, Costs, Prediction
from commplan.topology import Topology

if TYPE_CHECKING:
    from commplan.simulate.calibration import Calibration
    from commplan.simulate.predictor import Predictor


class Priced:
    """The `Costs` of one compilation. It remembers: passes ask for the same buckets again and again."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: dict[Ask, Prediction | None] = {}

    @property
    def measured(self) -> bool:
        return self._predictor.measured

    def predict(self, ask: Ask) -> Prediction | None:
        if ask not in self._known:
            told = self._predictor.predict(
                ask.kind, ask.algorithm, ask.axes, ask.nbytes, chunk=ask.chunk, root=ask.root, form=ask.form
            )
            self._known[ask] = Prediction(told.seconds, self._source(told.source)) if told else None
        return self._known[ask]

    def _source(self, told: str) -> str:
        """Where a number comes from, in words: a model is one of a topology, measured or not."""
        if told != "model":
            return told
        calibration, topology = self._predictor.calibration, self._predictor.network.topology
        if calibration is None:
            return f"model of topology `{topology.name}`, nothing measured"
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
    from commplan.simulate.predictor import Predictor  # noqa: PLC0415  only where times are asked for

    links = calibration.links if calibration is not None else None
    return Priced(Predictor(topology, tuple(axes), calibration=links, backend=backend, places=places))
