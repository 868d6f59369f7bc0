"""Predicts collectives over the axes of one mesh on a network.

A `Predictor` maps the axes of a schedule to the places of a topology and caches the predictions. Passes,
`prediction` and the command `simulate` share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import numpy as np

from commplan.collectives import registry
from commplan.collectives.program import Ints, Kind
from commplan.cost.calibration import Calibration
from commplan.cost.collective.bounds import busiest_bytes
from commplan.cost.collective.cost import (
    CollectiveQuery,
    CollectiveTime,
    CostKind,
    collective_time,
    least_seconds,
)
from commplan.cost.network.network import Floats, Layout, Network, layout_over, places_of
from commplan.cost.schedule.requests import places_of_servers
from commplan.diagnostics import fail
from commplan.ir.collective_kinds import GATHERING
from commplan.ir.ops.base import Work
from commplan.ir.plan import Algorithm, AxisKind
from commplan.ir.schedule import Axis, Backend, Collective, Form
from commplan.topology import MOST, Topology


class Predictor:
    """Predicts collectives over the axes of one mesh.

    Args:
        topology: The topology.
        axes: All axes of the schedule, mapped to `topology`; those of servers are declarations of servers.
        calibration: Measured links and collectives; None for the costs of the topology.
        backend: The backend.
        places: The place of each rank in mesh order, then of each server; None if the axes determine them.
            The servers may be omitted. With `places`, programs run in the order of places, and `native` in
            mesh order.

    Attributes:
        network: The topology with costs.
        calibration: As passed.
        backend: As passed.
        workers: The place of each rank in mesh order; [ranks].

    Raises:
        CommplanError: CP0713 for more than 16,777,216 ranks, CP0750 if an axis does not fit the topology.
    """

    def __init__(
        self,
        topology: Topology,
        axes: Sequence[Axis],
        *,
        calibration: Calibration | None = None,
        backend: Backend = "jax",
        places: Sequence[int] | None = None,
    ) -> None:
        self.network = Network.for_topology(topology, calibration)
        self.calibration = calibration
        self.backend: Backend = backend
        self._axes = tuple(axis for axis in axes if axis.kind is not AxisKind.SERVER)
        self._is_reordered = places is not None
        ranks = math.prod(axis.size for axis in self._axes)
        if ranks > MOST:
            message = f"cannot predict times of {ranks:,} ranks"
            fail("CP0713", message, f"at most {MOST:,} ranks are supported: use smaller axes")
        placed = None if places is None else np.asarray(places, np.int64)
        self.workers = places_of(self.network, self._axes) if placed is None else placed[:ranks]
        self._all, self._servers = tuple(axes), None if placed is None else placed[ranks:]
        self._layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}
        self._predictions = _cached_predictions(
            self.network, calibration, backend, self._axes, self.workers.tobytes(), self._is_reordered
        )

    @property
    def servers(self) -> Ints:
        """The place of each server, in the order of declaration; [servers]."""
        if self._servers is None or not len(self._servers):
            self._servers = places_of_servers(self.network, self._all, self.workers)
        return self._servers

    def layout(self, over: tuple[str, ...], *, native: bool = False) -> Layout:
        """The groups of a collective over `over`: in mesh order if `native`, else in the order of places."""
        if over not in self._layouts:
            layout = layout_over(self._axes, over, self.workers)
            self._layouts[over] = (layout, layout.in_order_of_places() if self._is_reordered else layout)
        return self._layouts[over][0 if native else 1]

    def predict(
        self,
        kind: CostKind,
        algorithm: Algorithm,
        axes: tuple[str, ...],
        nbytes: float,
        *,
        chunk: int | None = None,
        root: int = 0,
        form: Form | None = None,
    ) -> CollectiveTime | None:
        """Predict a collective.

        Args:
            kind: The kind of collective.
            algorithm: The algorithm.
            axes: The names of the axes of the collective.
            nbytes: Bytes of one rank's operand.
            chunk: Bytes of a message; None for the default, as in `CollectiveQuery`.
            root: The root's index along `axes`; for a `shift`, the distance to the destination.
            form: The form; None for the default form of the backend.

        Returns:
            The prediction; None if the algorithm does not implement the collective on these axes.
        """
        layout = self.layout(axes, native=algorithm.name == "native")
        whole = nbytes * layout.ranks if kind in GATHERING else nbytes
        query = CollectiveQuery(kind, layout, whole, self.network, self.backend, form, chunk, root)
        return collective_time(algorithm, query, self.calibration)

    def query(self, work: Work) -> CollectiveTime | None:
        """The result of `predict` for the collective of an op; cached."""
        work = work._replace(label="", name="")
        if work not in self._predictions:
            kind = cast("CostKind", work.kind)
            form = cast("Form | None", work.form)
            self._predictions[work] = self.predict(
                kind, work.algorithm, work.axes, work.nbytes, chunk=work.chunk, root=work.root, form=form
            )
        return self._predictions[work]

    def least_seconds(self, work: Work) -> float:
        """A lower bound on the seconds of a chunk program, from its bytes.

        0 for other algorithms, for very large groups (`ROUND_BY_ROUND`), and with a calibration, since
        measured times may be shorter.
        """
        kind, layout = work.kind, self.layout(work.axes)
        if self.calibration is not None or not registry.supports(work.algorithm.name, cast("Kind", kind)):
            return 0.0
        whole = work.nbytes * (layout.ranks if kind == "all_gather" else 1)
        return least_seconds(work.algorithm.name, cast("Kind", kind), layout, whole, self.network, work.root)

    def in_words(self, source: str) -> str:
        """A description of `source`, the `CollectiveTime.source` of a prediction of this predictor.

        For `model` it names the topology and whether its links were measured.
        """
        if source != "model":
            return source
        topology = self.network.topology
        if self.calibration is None:
            gpus = topology.round is not None or topology.devices is not None
            guess = "a guess until calibrated: " if gpus else ""
            return f"{guess}model of topology `{topology.name}`, nothing measured"
        return f"model of topology `{topology.name}`, its levels measured {self.calibration.date}"

    def least_bytes(self, op: Collective) -> Floats:
        """A lower bound on the bytes on the busiest link of each level [levels], for any algorithm."""
        layout = self.layout(op.axes)
        whole = op.nbytes * (layout.ranks if op.kind == "all_gather" else 1)
        return busiest_bytes(op.kind, whole, layout, self.network, root=op.root or 0)


@lru_cache(maxsize=64)
def _cached_predictions(
    network: Network, calibration: Calibration | None, backend: Backend, axes: tuple[Axis, ...],
    workers: bytes, is_reordered: bool,
) -> dict[Work, CollectiveTime | None]:  # fmt: skip
    """The initially empty prediction cache of a machine.

    All predictors with equal arguments share it, because plans are compiled repeatedly.
    """
    del network, calibration, backend, axes, workers, is_reordered
    return {}


def predictor_for(
    axes: Sequence[Axis],
    topology: Topology | None,
    calibration: Calibration | None,
    backend: Backend,
    places: Sequence[int] | None = None,
) -> Predictor | None:
    """The predictor of a mesh of `axes` on `topology`; None without a topology.

    Args:
        axes: All axes of the schedule.
        topology: The topology.
        calibration: Ignored if it contains only costs of the input.
        backend: The backend.
        places: As in `Predictor`.

    Raises:
        CommplanError: As `Predictor`.
    """
    if topology is None:
        return None
    links = calibration.links if calibration is not None else None
    return Predictor(topology, axes, calibration=links, backend=backend, places=places)
