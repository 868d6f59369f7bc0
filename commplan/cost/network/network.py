"""The network that prices a plan: links of a topology, what messages and calls cost, and where ranks lie.

A topology is a tree of levels. Each member of a level has one full-duplex link to the switch of its level:
a GPU to its node's, a node to its pod's. A transfer between two places climbs to the outermost level on which
they differ: it uses the up links of the source's members up to that level, the down links of the
destination's, and has that level's latency. Members of level 0 are the places themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from commplan.collectives.program import Ints
from commplan.cost.calibration import Calibration
from commplan.diagnostics import fail
from commplan.ir.schedule import Axis
from commplan.topology import Level, Topology

Floats = npt.NDArray[np.float64]

# What is assumed where nothing was measured.
OVERHEAD = 0.1  # of the innermost latency: CPU time of one message at each end
LISTED = 64  # ranks whose places are spelled out in the shape of a layout
CALL = 5e-6  # seconds: one call into the backend
GAMMA = 1 / 20e9  # seconds for each byte reduced, and never slower than the innermost link times four


@dataclass(frozen=True)
class Network:
    """A topology with costs.

    levels: innermost first; latency (alpha) in seconds, bandwidth (1 / beta) in bytes a second for each
    member and direction. overhead: seconds of CPU for a message, at each end. gamma: seconds for each byte
    reduced. call: seconds of one call into the backend. round: of each operation after the first, where every
    round is one. measured: whether a calibration gave them.
    """

    topology: Topology
    levels: tuple[Level, ...]
    overhead: float
    gamma: float
    call: float
    round: float
    measured: bool = False

    @classmethod
    def of(cls, topology: Topology, calibration: Calibration | None = None) -> Network:
        """The network that the file describes, with what was measured, else the defaults of this module."""
        first = topology.levels[0]
        gamma = min(GAMMA, 1 / (4 * (topology.memory or first.bandwidth)))
        if calibration is None:
            call = CALL if topology.call is None else topology.call
            round_ = call if topology.round is None else topology.round
            return cls(topology, topology.levels, OVERHEAD * first.latency, gamma, call, round_)
        measured = {level.name: level for level in calibration.levels}
        levels = tuple(
            msgspec.structs.replace(level, latency=known.latency, bandwidth=known.bandwidth)
            if (known := measured.get(level.name))
            else level
            for level in topology.levels
        )
        costs = calibration
        return cls(topology, levels, costs.overhead, costs.gamma, costs.call, costs.round, measured=True)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How many places a member of each level holds."""
        counts = [level.count for level in self.levels]
        return tuple(math.prod(counts[:i]) for i in range(len(counts)))

    @cached_property
    def latencies(self) -> Floats:
        """Of each level, [levels]."""
        return np.array([level.latency for level in self.levels])

    @cached_property
    def bandwidths(self) -> Floats:
        """Of each level, [levels]."""
        return np.array([level.bandwidth for level in self.levels])

    def by_level(self, loads: Floats) -> tuple[tuple[str, float], ...]:
        """`loads` [levels] with the names of the levels."""
        return tuple((level.name, float(load)) for level, load in zip(self.levels, loads, strict=True))

    @property
    def places(self) -> int:
        return self.topology.places

    def adds_in_switch(self, level: int) -> bool:
        """Whether the switch that joins members of `level` can sum, as inside nodes of H100 and H200."""
        topology = self.topology
        return topology.devices in ("h100", "h200") and self.strides[level] < topology.host_places

    def units(self, places: Ints, level: int) -> Ints:
        """The member of `level` in which each place lies, counted over the whole machine."""
        return places // self.strides[level]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the ranks of a collective lie.

    groups [g, n]: the place of each rank, for the g groups that do the same at the same time (one for each
    position along the other axes). axes: those of the collective, where it comes from a plan.
    """

    groups: Ints
    axes: tuple[Axis, ...] = ()

    @property
    def ranks(self) -> int:
        return int(self.groups.shape[1])

    @cached_property
    def key(self) -> str:
        """Equal for layouts that lie alike."""
        shape = "x".join(map(str, self.groups.shape))
        return f"{shape}:{hashlib.sha256(np.ascontiguousarray(self.groups).tobytes()).hexdigest()}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key and self.axes == other.axes

    def __hash__(self) -> int:
        return hash(self.key)

    def in_order_of_places(self) -> Layout:
        """The ranks of each group by place: how a program is laid that does not follow the rank order."""
        return dataclasses.replace(self, groups=np.sort(self.groups, axis=1))


def one_group(places: Sequence[int] | Ints) -> Layout:
    """A single group: `places` of its ranks, in rank order."""
    return Layout(np.asarray(places, np.int64)[None, :])


def places_of(network: Network, axes: Sequence[Axis]) -> Ints:
    """The place of each rank of the mesh of placed `axes`, row-major, the last axis innermost.

    Raises CP0750 where an axis is on no level of the network.
    """
    total = np.zeros(1, np.int64)
    for part in _offsets(network, axes):
        total = (total[:, None] + part[None, :]).ravel()
    return total % network.places  # ranks that share places (--oversubscribe) wrap around


def lay(axes: Sequence[Axis], over: Sequence[str], places: Ints) -> Layout:
    """Where the groups of a collective over `over` lie; `places` of the mesh of `axes`, row-major.

    Ranks of a group count row-major over `over`, first named major.
    """
    names = [axis.name for axis in axes]
    inside = [names.index(name) for name in over]
    outside = [index for index in range(len(names)) if index not in inside]
    mesh = places.reshape([axis.size for axis in axes]).transpose(*outside, *inside)
    ranks = math.prod(axes[index].size for index in inside)
    return Layout(np.ascontiguousarray(mesh).reshape(-1, ranks), tuple(axes[index] for index in inside))


def _offsets(network: Network, axes: Sequence[Axis]) -> list[Ints]:
    """What each axis adds to the place, for each position along it; the last axis of a level is innermost."""
    room = {level.name: stride for level, stride in zip(network.levels, network.strides, strict=True)}
    offsets: list[Ints] = []
    for axis in reversed(axes):
        position, offset = np.arange(axis.size, dtype=np.int64), np.zeros(axis.size, np.int64)
        for index, spread in enumerate(axis.levels):
            if spread.level not in room:
                _unplaced(axis, network)
            last = index == len(axis.levels) - 1
            offset += (position if last else position % spread.count) * room[spread.level]
            position //= spread.count
            room[spread.level] *= spread.count
        if axis.size > 1 and not axis.levels:
            _unplaced(axis, network)
        offsets.append(offset)
    return offsets[::-1]


def _unplaced(axis: Axis, network: Network) -> None:
    note = (
        f"its levels: {', '.join(spread.level for spread in axis.levels) or 'none'}; those of the topology: "
        f"{', '.join(level.name for level in network.levels)}"
    )
    remedy = "compile the plan for this topology, or place its axes with --map AXIS=LEVEL"
    fail("CP0750", f"axis `{axis.name}` does not lie on topology `{network.topology.name}`", note, remedy)


def shape_of(layout: Layout, network: Network) -> str:
    """How the first group lies, up to renaming of places: `host 0 1 2 3`, `rack/host 0/0 0/1 1/2 1/3`.

    Only levels that tell ranks apart are named, outermost first, their members counted in order of ranks.
    """
    columns: list[Ints] = []
    names: list[str] = []
    for index in reversed(range(len(network.levels))):
        _, first, where = np.unique(
            network.units(layout.groups[0], index), return_index=True, return_inverse=True
        )
        if len(first) > 1:
            names.append(network.levels[index].name)
            columns.append(np.argsort(np.argsort(first))[where.ravel()])
    ranks = [list(map(str, rank)) for rank in zip(*columns, strict=True)]
    text = " ".join("/".join(rank) for rank in ranks)
    if layout.ranks > LISTED:
        text = f"{layout.ranks} ranks {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{'/'.join(names)} {text}"
