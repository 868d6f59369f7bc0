"""Predicts compiled collectives on the links of a topology, with the cost model of schedules.

`commplan.lowering.gpu.estimate` and the audit use it instead of the data sheets of GPUs.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from commplan.collectives.program import Ints
from commplan.cost import Calibration, CollectiveQuery, Predictor, collective_time, predictor_for
from commplan.cost.collective.cost import CostKind
from commplan.cost.network.network import Layout
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Schedule
from commplan.ir.types import sized
from commplan.lowering.hlo.step import CompiledCollective
from commplan.topology import Topology, assign_levels

_PREDICTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")  # by the cost model
_NATIVE = Algorithm("native")  # XLA uses the native collectives


class TopologyLinks:
    """The links of a `Predictor`, for `commplan.lowering.gpu.estimate`.

    Attributes:
        levels: The names of the levels, innermost first.
        source: The origin of the times, as one sentence.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor, self._network = predictor, predictor.network
        self._times: dict[tuple[object, ...], tuple[float, dict[str, float]]] = {}
        self.levels = tuple(level.name for level in self._network.levels)
        date = predictor.calibration.date if predictor.calibration else ""
        rates = ", ".join(f"{level.name} {sized(level.bandwidth)}/s" for level in self._network.levels)
        origin = f"calibrated {date}" if date else "not measured"
        self.source = f"links of topology `{self._network.topology.name}`, {origin}: {rates}"

    def seconds(self, collective: CompiledCollective) -> tuple[float, dict[str, float]]:
        """Seconds of one collective alone, and the seconds that it occupies each level, by name.

        Levels that it does not use are omitted.
        """
        key = (collective.kind, collective.nbytes, collective.groups)
        if key not in self._times:
            self._times[key] = self._predict(collective)
        return self._times[key]

    def _predict(self, collective: CompiledCollective) -> tuple[float, dict[str, float]]:
        """As `seconds`. Kinds that are not in `_PREDICTED` are permutations of pairs."""
        ranks = np.asarray(collective.groups, np.int64)
        workers = self._predictor.workers
        # A mesh with more devices than the schedule has ranks is placed in the order of its devices.
        places: Ints = workers[ranks] if ranks.max() < len(workers) else ranks % self._network.places
        if collective.kind not in _PREDICTED:
            return self._permute(places, collective.nbytes)
        nbytes = collective.nbytes * (places.shape[1] if collective.kind == "all_gather" else 1)
        kind, backend = cast("CostKind", collective.kind), self._predictor.backend
        query = CollectiveQuery(kind, Layout(places), nbytes, self._network, backend)
        predicted = collective_time(_NATIVE, query, self._predictor.calibration)
        assert predicted is not None  # the backend supports all kinds
        return predicted.seconds, self._busy(np.array([moved for _, moved in predicted.nbytes]))

    def _permute(self, pairs: Ints, nbytes: int) -> tuple[float, dict[str, float]]:
        """The time of one message of `nbytes` for each pair of source and target, all at the same time.

        `pairs` has the shape (messages, 2). The busiest member of a level determines its time.
        """
        load, latency = np.zeros(len(self.levels)), 0.0  # bytes on each level; seconds
        crossing = pairs[pairs[:, 0] != pairs[:, 1]]
        for index, level in enumerate(self._network.levels):
            if not len(crossing):
                break
            members = crossing // self._network.strides[index]
            busiest = max(np.unique(members[:, end], return_counts=True)[1].max() for end in (0, 1))
            load[index], latency = nbytes * busiest, level.latency
            crossing = crossing[members[:, 0] // level.count != members[:, 1] // level.count]
        return self._network.call + latency + float((load / self._network.bandwidths).max()), self._busy(load)

    def _busy(self, load: np.ndarray) -> dict[str, float]:
        """The seconds that `load`, in bytes on each level, occupies the levels that it uses."""
        pairs = zip(self.levels, (load / self._network.bandwidths).tolist(), strict=True)
        return {level: seconds for level, seconds in pairs if seconds > 0}


def links_of(schedule: Schedule, topology: Topology, calibration: Calibration | None = None) -> TopologyLinks:
    """The links of `topology` for the steps of `schedule`, with the costs of `calibration`.

    Axes are mapped as in the schedule, or by name if it was compiled for no topology or for another one.

    Raises:
        CommplanError: CP0713 if they do not fit, CP0753 for a calibration of another backend.
    """
    if calibration is not None:
        calibration.check_backend(schedule.backend)
    compiled_for = schedule.topology is not None and schedule.topology.digest == topology.digest
    axes = schedule.axes if compiled_for else assign_levels(schedule.axes, topology, {})
    predictor = predictor_for(axes, topology, calibration, schedule.backend)
    assert predictor is not None
    return TopologyLinks(predictor)
