"""The machine as a tree of levels and members, with the load of each link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commplan.collectives.program import Ints
from commplan.cost import Prediction, Predictor
from commplan.cost.network.network import Network
from commplan.cost.schedule.link_loads import link_loads
from commplan.cost.schedule.requests import LinkLoads
from commplan.ir.schedule import Schedule
from commplan.report.document import LinkLevel, MachineLoad, MachineMember

SHOWN = 64  # most places in the picture; deep machines may have more, see `_shown`

Loads = Sequence[list[LinkLoads]]  # loads of links by phase and level; empty if not counted


def machine(schedule: Schedule, predictor: Predictor, prediction: Prediction) -> MachineLoad:
    """The topology of `predictor` with the bytes of each phase.

    Args:
        schedule: the schedule.
        predictor: the cost model of the machine.
        prediction: the times of `schedule`, with the bytes on the busiest links.
    """
    network = predictor.network
    counted = [link_loads(schedule, phase, predictor) for phase in schedule.phases]
    loads = [phase_loads for phase_loads in counted if phase_loads is not None]
    by_level = [dict(phase.nbytes) for phase in prediction.phases]
    levels = tuple(
        LinkLevel(level.name, level.count, level.latency, level.bandwidth,
              tuple(nbytes.get(level.name, 0.0) for nbytes in by_level))
        for level in reversed(network.levels)
    )  # fmt: skip
    serves = len(schedule.mesh_axes) < len(schedule.axes)
    servers = predictor.servers if serves else np.zeros(0, np.int64)
    picture = _Picture(network, loads if len(loads) == len(counted) else [], predictor.workers, servers)
    remarks: list[str] = []
    if picture.hides:
        remarks.append(f"{network.places:,} places: identical members are combined")
    if len(loads) < len(counted):
        remarks.append("too many to count link by link: every link is drawn as the busiest of its level")
    return MachineLoad(
        network.topology.name,
        network.places,
        tuple(phase.name for phase in schedule.phases),
        levels,
        picture.members(len(network.levels) - 1, 0),
        "; ".join(remarks),
    )


class _Picture:
    """Selects the members of levels to draw. Levels count from 0, innermost first.

    Args:
        network: the levels of the machine.
        loads: bytes on each link; empty if links are not counted individually.
        workers: the place of each rank.
        servers: the place of each server.

    Attributes:
        used: the indices of the members of each level that contain ranks or servers.
        shown: most members to draw at each level, within one member of the next outer level.
        hides: whether some used members are merged.
    """

    def __init__(self, network: Network, loads: Loads, workers: Ints, servers: Ints) -> None:
        self.network, self.loads, self.workers, self.servers = network, loads, workers, servers
        places = np.unique(np.concatenate([workers, servers]))
        self.used = [np.unique(network.units(places, level)) for level in range(len(network.levels))]
        counts = [self._most(level) for level in range(len(network.levels))]
        self.shown = _shown(counts)
        self.hides = self.shown != counts

    def _most(self, level: int) -> int:
        """The largest number of used members of `level` within one member of the next outer level."""
        outside = self.used[level] // self.network.levels[level].count
        return int(np.bincount(outside - outside.min()).max())

    def members(self, level: int, first: int) -> tuple[MachineMember, ...]:
        """The members of `level` from index `first` within one member of the next outer level.

        Idle neighbors are merged; if many are used, only the first ones and the last are drawn separately.
        """
        end = first + self.network.levels[level].count
        used = [int(unit) for unit in self.used[level] if first <= unit < end]
        separate = used if len(used) <= self.shown[level] else [*used[: self.shown[level] - 2], used[-1]]
        drawn: list[MachineMember] = []
        # Draw each separate member, and merge the members between it and the next one.
        for unit, after in zip([first - 1, *separate], [*separate, end], strict=True):
            if unit >= first:
                drawn.append(self._member(level, unit, unit + 1))
            if unit + 1 < after:
                drawn.append(self._member(level, unit + 1, after))
        return tuple(drawn)

    def _member(self, level: int, first: int, end: int) -> MachineMember:
        """Member `first` of `level`, or the merged members from `first` to `end` - 1."""
        up = down = None
        if self.loads:
            up = tuple(float(phase[level][0][first:end].max()) for phase in self.loads)
            down = tuple(float(phase[level][1][first:end].max()) for phase in self.loads)
        holds = self._holds(level, first, end)
        hidden = end - first if end - first > 1 else 0
        is_leaf = hidden or not holds or not level  # inner members are not drawn
        inner = () if is_leaf else self.members(level - 1, first * self._inside(level))
        return MachineMember(self._name(level, first), up, down, holds, inner, hidden)

    def _inside(self, level: int) -> int:
        """Number of members of the next inner level in one member of `level`, which is not the innermost."""
        return self.network.levels[level - 1].count

    def _name(self, level: int, index: int) -> str:
        """The name of a member: that of its host, or its level and its number in the next outer level."""
        topology = self.network.topology
        if topology.hosts and self.network.strides[level] == topology.host_places:
            return topology.hosts[index]
        return f"{self.network.levels[level].name} {index % self.network.levels[level].count}"

    def _holds(self, level: int, first: int, end: int) -> str:
        """The ranks and servers of these members, for example `ranks 0 to 3`."""
        stride = self.network.strides[level]
        parts: list[str] = []
        for word, places in (("rank", self.workers), ("server", self.servers)):
            inside = np.flatnonzero((places >= first * stride) & (places < end * stride))
            if len(inside) == 1:
                parts.append(f"{word} {inside[0]}")
            elif len(inside):
                is_run = inside[-1] - inside[0] + 1 == len(inside)
                run = f"{inside[0]} to {inside[-1]}" if is_run else f"{inside[0]}, {inside[1]}, .."
                parts.append(f"{word}s {run}")
        return ", ".join(parts)


def _shown(counts: Sequence[int]) -> list[int]:
    """The number of members to draw at each level.

    The largest counts are reduced until at most `SHOWN` places are drawn, or until all levels have 3 members
    or fewer: the first, merged ones, and the last.
    """
    shown = list(counts)
    while np.prod(shown, dtype=np.float64) > SHOWN:
        largest = max(range(len(shown)), key=lambda level: (shown[level], level))
        if shown[largest] <= 3:
            break
        shown[largest] = max(3, min(8, shown[largest] - 1))  # a count above 8 becomes 8 at once
    return shown
