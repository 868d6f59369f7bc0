"""The network model: links of a topology, costs of messages and calls, and places of ranks.

A topology is a tree of levels. Each member of a level has one full-duplex link to the switch of its level: a
GPU to that of its node, a node to that of its pod. Members of level 0 are the places of ranks.

A transfer between two places crosses the outermost level on which they differ, and has its latency. It uses
the up links of the source's members up to that level, and the down links of the destination's.
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

# Assumptions without measurements.
OVERHEAD = 0.1  # fraction of the innermost latency: CPU time per message at each end
CALL = 5e-6  # seconds per call into the backend, if the topology does not specify it
GAMMA = 1 / 20e9  # seconds per reduced byte, unless a quarter of a byte's time in memory is shorter

LISTED = 64  # ranks; the shape of a larger layout has a digest instead of places


@dataclass(frozen=True)
class Network:
    """A topology with costs.

    Attributes:
        topology: The topology.
        levels: The levels, innermost first: latency (alpha) in seconds, and bandwidth (1 / beta) in bytes per
            second for each member and direction.
        overhead: CPU seconds per message, at each end.
        gamma: Seconds per reduced byte.
        call: Seconds of one call into the backend.
        round: Seconds of each round in the form `rounds`, since every round is an operation there.
        measured: Whether the costs are from a calibration.
    """

    topology: Topology
    levels: tuple[Level, ...]
    overhead: float
    gamma: float
    call: float
    round: float
    measured: bool = False

    @classmethod
    def for_topology(cls, topology: Topology, calibration: Calibration | None = None) -> Network:
        """The network of a topology.

        Args:
            topology: The topology.
            calibration: The source of all costs except those of levels that it does not contain. None for the
                costs in the topology and, if it lacks them, the assumptions of this module.
        """
        first = topology.levels[0]
        gamma = min(GAMMA, 1 / (4 * (topology.memory or first.bandwidth)))
        if calibration is None:
            call = CALL if topology.call is None else topology.call
            round_ = call if topology.round is None else topology.round
            return cls(topology, topology.levels, OVERHEAD * first.latency, gamma, call, round_)
        measured = {level.name: level for level in calibration.levels}
        levels = tuple(
            msgspec.structs.replace(level, latency=measured_level.latency, bandwidth=measured_level.bandwidth)
            if (measured_level := measured.get(level.name))
            else level
            for level in topology.levels
        )
        costs = calibration
        return cls(topology, levels, costs.overhead, costs.gamma, costs.call, costs.round, measured=True)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The number of places in a member of each level."""
        counts = [level.count for level in self.levels]
        return tuple(math.prod(counts[:i]) for i in range(len(counts)))

    @cached_property
    def latencies(self) -> Floats:
        """The latency of each level, [levels]."""
        return np.array([level.latency for level in self.levels])

    @cached_property
    def bandwidths(self) -> Floats:
        """The bandwidth of each level, [levels]."""
        return np.array([level.bandwidth for level in self.levels])

    def by_level(self, loads: Floats) -> tuple[tuple[str, float], ...]:
        """Pairs of the name of a level and its entry of `loads` [levels], innermost first."""
        return tuple((level.name, float(load)) for level, load in zip(self.levels, loads, strict=True))

    @property
    def places(self) -> int:
        """The number of places of the machine."""
        return self.topology.places

    def adds_in_switch(self, level: int) -> bool:
        """Whether the switch of `level` can add, as inside nodes of H100 and H200."""
        topology = self.topology
        return topology.devices in ("h100", "h200") and self.strides[level] < topology.host_places

    def units(self, places: Ints, level: int) -> Ints:
        """The member of `level` that contains each place, numbered over the whole machine; any shape."""
        return places // self.strides[level]


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of the ranks of a collective. Layouts with equal places and axes are equal.

    Attributes:
        groups: The place of each rank [g, n], for the g groups of n ranks that run the collective at the same
            time. There is one group for each position along the other axes.
        axes: The axes of the collective, the first axis major; empty if it does not come from a plan.
    """

    groups: Ints
    axes: tuple[Axis, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of each group."""
        return int(self.groups.shape[1])

    @cached_property
    def key(self) -> str:
        """The shape and a digest of `groups`. It is equal for layouts with the same places."""
        shape = "x".join(map(str, self.groups.shape))
        return f"{shape}:{hashlib.sha256(np.ascontiguousarray(self.groups).tobytes()).hexdigest()}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key and self.axes == other.axes

    def __hash__(self) -> int:
        return hash(self.key)

    def in_order_of_places(self) -> Layout:
        """The ranks of each group sorted by place, for programs that do not follow the rank order."""
        return dataclasses.replace(self, groups=np.sort(self.groups, axis=1))


def one_group(places: Sequence[int] | Ints) -> Layout:
    """A layout of a single group with the ranks at `places`, in rank order."""
    return Layout(np.asarray(places, np.int64)[None, :])


def places_of(network: Network, axes: Sequence[Axis]) -> Ints:
    """The place of each rank of a mesh [ranks], row-major over `axes`, the last axis innermost.

    Raises:
        CommplanError: CP0750 if an axis has a level that the network lacks, or more than one rank and no
            level.
    """
    total = np.zeros(1, np.int64)
    for part in _offsets(network, axes):
        total = (total[:, None] + part[None, :]).ravel()
    return total % network.places  # ranks that share places (--oversubscribe) wrap around


def layout_over(axes: Sequence[Axis], over: Sequence[str], places: Ints) -> Layout:
    """The groups of a collective over some axes of a mesh.

    Args:
        axes: The axes of the mesh.
        over: The names of the axes of the collective. Ranks of a group are counted row-major over them.
        places: The place of each rank of the mesh, row-major over `axes`.
    """
    names = [axis.name for axis in axes]
    inside = [names.index(name) for name in over]
    outside = [index for index in range(len(names)) if index not in inside]
    mesh = places.reshape([axis.size for axis in axes]).transpose(*outside, *inside)
    ranks = math.prod(axes[index].size for index in inside)
    return Layout(np.ascontiguousarray(mesh).reshape(-1, ranks), tuple(axes[index] for index in inside))


def _offsets(network: Network, axes: Sequence[Axis]) -> list[Ints]:
    """For each axis, the offset that each position adds to the place [size].

    If several axes are mapped to one level, the last one is innermost.
    """
    stride_of = {level.name: stride for level, stride in zip(network.levels, network.strides, strict=True)}
    offsets: list[Ints] = []
    for axis in reversed(axes):
        position = np.arange(axis.size, dtype=np.int64)
        offset = np.zeros(axis.size, np.int64)
        for index, spread in enumerate(axis.levels):
            if spread.level not in stride_of:
                _fail_unplaced(axis, network)
            is_last = index == len(axis.levels) - 1
            offset += (position if is_last else position % spread.count) * stride_of[spread.level]
            position //= spread.count
            stride_of[spread.level] *= spread.count
        if axis.size > 1 and not axis.levels:
            _fail_unplaced(axis, network)
        offsets.append(offset)
    return offsets[::-1]


def _fail_unplaced(axis: Axis, network: Network) -> None:
    note = (
        f"levels of the axis: {', '.join(spread.level for spread in axis.levels) or 'none'}; topology: "
        f"{', '.join(level.name for level in network.levels)}"
    )
    fix = "compile the plan for this topology, or place its axes with --map AXIS=LEVEL"
    fail("CP0750", f"axis `{axis.name}` does not fit topology `{network.topology.name}`", note, fix)


def shape_of(layout: Layout, network: Network) -> str:
    """The placement of the first group, such as `host 0 1 2 3` or `rack/host 0/0 0/1 1/2 1/3`.

    Only levels on which ranks differ are included, outermost first. Members are numbered in rank order, so
    the placement does not depend on the numbers of places. For more than `LISTED` ranks, the list of members
    is replaced by the number of ranks and a digest. Calibrations use this text as the key of a curve.
    """
    columns: list[Ints] = []
    names: list[str] = []
    for index in reversed(range(len(network.levels))):
        _, first, inverse = np.unique(
            network.units(layout.groups[0], index), return_index=True, return_inverse=True
        )
        if len(first) > 1:
            names.append(network.levels[index].name)
            columns.append(np.argsort(np.argsort(first))[inverse.ravel()])
    ranks = [list(map(str, rank)) for rank in zip(*columns, strict=True)]
    text = " ".join("/".join(rank) for rank in ranks)
    if layout.ranks > LISTED:
        text = f"{layout.ranks} ranks {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{'/'.join(names)} {text}"
