"""Predicted times of collectives, from `commplan.simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commplan.ir.schedule import Axis, Backend
from commplan.passes.costs import Costs
from commplan.topology import Topology

if TYPE_CHECKING:
    from commplan.simulate.calibration import Calibration


def costs_for(
    axes: tuple[Axis, ...],
    topology: Topology | None,
    calibration: Calibration | None,
    backend: Backend,
    places: tuple[int, ...] | None = None,
) -> Costs | None:
    return None
