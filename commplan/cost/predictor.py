"""The machine of one compilation: axes placed on a network, and what any collective over them takes."""

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
from commplan.cost.collective.cost import CollectiveTime, CostKind, collective_time, least_seconds
from commplan.cost.network.network import Floats, Layout, Network, lay, places_of
from commplan.cost.servers.requests import places_of_servers
from commplan.diagnostics import fail
from commplan.ir.ops.base import Work
from commplan.ir.plan import Algorithm, AxisKind
from commplan.ir.schedule import Axis, Backend, Collective, Form
from commplan.topology import MOST, Topology


class Predictor:
    """Predicts collectives over the axes of one mesh.

    axes: all axes of the schedule, placed on `topology`. places: of each rank in mesh order, where ranks
    really run, servers behind them; None where the axes say it. Programs are laid in the order of `places`
    then, `native` is not.
    Raises CP0713 for more than 16,777,216 ranks, and CP0750 if an axis does not lie on the topology.
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
        self.network = Network.of(topology, calibration)
        self.calibration = calibration
        self.backend: Backend = backend
        self._axes = tuple(axis for axis in axes if axis.kind is not AxisKind.SERVER)
        self._moved = places is not None
        ranks = math.prod(axis.size for axis in self._axes)
        if ranks > MOST:
            message = f"times of {ranks:,} ranks cannot be predicted"
            fail("CP0713", message, f"expected at most {MOST:,} ranks; give smaller axes")
        given = None if places is None else np.asarray(places, np.int64)
        self.workers = places_of(self.network, self._axes) if given is None else given[:ranks]
        self._all, self._servers = tuple(axes), None if given is None else given[ranks:]
        self._layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}
        self._known = _known(
            self.network, calibration, backend, self._axes, self.workers.tobytes(), self._moved
        )

    @property
    def measured(self) -> bool:
        """Whether a calibration is behind the answers."""
        return self.calibration is not None

    @property
    def servers(self) -> Ints:
        """The place of each server, declarations in their order."""
        if self._servers is None or not len(self._servers):
            self._servers = places_of_servers(self.network, self._all, self.workers)
        return self._servers

    def layout(self, over: tuple[str, ...], *, native: bool = False) -> Layout:
        """Where the groups of a collective over `over` lie, as `native` sees them or as programs are laid."""
        if over not in self._layouts:
            layout = lay(self._axes, over, self.workers)
            self._layouts[over] = (layout, layout.in_order_of_places() if self._moved else layout)
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
        """The prediction; None where there is no such program. nbytes: of one rank's operand."""
        layout = self.layout(axes, native=algorithm.name == "native")
        whole = nbytes * layout.ranks if kind in ("all_gather", "gather") else nbytes
        return collective_time(
            algorithm, kind, layout, whole, self.network, calibration=self.calibration,
            backend=self.backend, form=form, chunk=chunk, root=root,
        )  # fmt: skip

    def query(self, work: Work) -> CollectiveTime | None:
        """The prediction for a collective that an op asks for; the same is computed once."""
        work = work._replace(label="", name="")
        if work not in self._known:
            kind, form = cast("CostKind", work.kind), cast("Form | None", work.form)
            self._known[work] = self.predict(
                kind, work.algorithm, work.axes, work.nbytes, chunk=work.chunk, root=work.root, form=form
            )
        return self._known[work]

    def least_seconds(self, work: Work) -> float:
        """Seconds that a chunk program takes at least for its bytes; 0 of anything else, or if it was
        measured."""
        kind, layout = work.kind, self.layout(work.axes)
        if self.calibration is not None or not registry.supports(work.algorithm.name, cast("Kind", kind)):
            return 0.0
        whole = work.nbytes * (layout.ranks if kind == "all_gather" else 1)
        return least_seconds(work.algorithm.name, cast("Kind", kind), layout, whole, self.network, work.root)

    def in_words(self, source: str) -> str:
        """Where a predicted time comes from: a model is one of a topology, measured or not."""
        if source != "model":
            return source
        topology = self.network.topology
        if self.calibration is None:
            gpus = topology.round is not None or topology.devices is not None
            guess = "a guess until calibrated: " if gpus else ""
            return f"{guess}model of topology `{topology.name}`, nothing measured"
        return f"model of topology `{topology.name}`, its levels measured {self.calibration.date}"

    def least_bytes(self, op: Collective) -> Floats:
        """What a collective puts on the busiest link of each level at least [levels]."""
        layout = self.layout(op.axes)
        whole = op.nbytes * (layout.ranks if op.kind == "all_gather" else 1)
        return busiest_bytes(op.kind, whole, layout, self.network, root=op.root or 0)


@lru_cache(maxsize=64)
def _known(
    network: Network, calibration: Calibration | None, backend: Backend, axes: tuple[Axis, ...],
    workers: bytes, moved: bool,
) -> dict[Work, CollectiveTime | None]:  # fmt: skip
    """The predictions of all predictors of the same machine: a plan is compiled again and again, and what it
    became is predicted by each tool."""
    del network, calibration, backend, axes, workers, moved
    return {}


def predictor_for(
    axes: Sequence[Axis],
    topology: Topology | None,
    calibration: Calibration | None,
    backend: Backend,
    places: Sequence[int] | None = None,
) -> Predictor | None:
    """The predictor of a mesh of `axes` on `topology`; None without a topology.

    calibration: the links that it measured are used, if any.
    """
    if topology is None:
        return None
    links = calibration.links if calibration is not None else None
    return Predictor(topology, axes, calibration=links, backend=backend, places=places)
