"""The arrays of a server: its units of all states, and memory for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.protocol.sites import Sites
from commplan.protocol.units import StateLayout, StateUnit
from commplan.runtime.input.layout import aligned
from commplan.runtime.input.sources.record_convert import numpy_dtype

Array = npt.NDArray[Any]
_BYTE = np.dtype(np.uint8)
_MAX_FREE = 64  # The most free buffers of one size.


class Pool:
    """Memory for messages. It is reused, because touching fresh pages would take longer than the work."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}  # By the number of bytes.

    def take(self, nbytes: int) -> Array:
        """A buffer, u8[nbytes], aligned, with undefined content."""
        free = self._free.get(nbytes)
        return free.pop() if free else aligned((nbytes,), _BYTE)

    def give(self, buffer: Array) -> None:
        """Return `buffer`, which came from `take`, to the pool. It must not be used any more."""
        free = self._free.setdefault(buffer.size, [])
        if len(free) < _MAX_FREE:
            free.append(buffer)


def raw(array: Array) -> Array:
    """The bytes of a contiguous array, u8[nbytes], without a copy."""
    return array.reshape(-1).view(np.uint8)


@dataclass
class Shard:
    """One unit of a state: a flat array for each slot, and the scalars of the state.

    Weights have one slot. An auxiliary state has a slot for each copy of the weights' structure.

    Attributes:
        unit: The unit.
        dtypes: The dtypes of the slots.
        scalar_dtypes: The dtypes of the scalars.
        slots: The arrays, of `unit.size` elements; None for one that is not set.
        scalars: Arrays without dimensions; None for one that is not set.
        version: The number of times that the unit was set, updated or pulled.
        updates: The number of times that it was updated or pulled.
    """

    unit: StateUnit
    dtypes: tuple[DType, ...]
    scalar_dtypes: tuple[DType, ...]
    slots: list[Array | None]
    scalars: list[Array | None]
    version: int = 0
    updates: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all values are set."""
        return all(array is not None for array in (*self.slots, *self.scalars))

    def arrays(self) -> list[Array]:
        """All arrays that are set."""
        return [array for array in (*self.slots, *self.scalars) if array is not None]

    def weights(self) -> Array:
        """The array of the first slot, which must be set; the only one of weights."""
        array = self.slots[0]
        assert array is not None, "used before it was set"
        return array


@dataclass
class StateCell:
    """A state of one group of workers on this server.

    Attributes:
        name: The name of the state.
        group: The index of the group.
        layout: The division of the state into units, on all servers.
        units: The units on this server, by number.
        shared: Whether other processes write the state, too, so that its arrays must not move.
    """

    name: str
    group: int
    layout: StateLayout
    units: dict[int, Shard] = field(default_factory=dict[int, Shard])
    shared: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all units are set."""
        return all(shard.is_complete for shard in self.units.values())


class Store:
    """All states of a server; iteration gives each cell with each of its shards.

    Args:
        sites: The calls to servers in the plan.
        server: The number of the server among all servers of the plan.
        leaves: The leaves of each state on a server, by name.

    Attributes:
        cells: The states by name and group.
    """

    def __init__(self, sites: Sites, server: int, leaves: Mapping[str, tuple[Leaf, ...]]) -> None:
        self.cells: dict[tuple[str, int], StateCell] = {}
        for site in sites.all:
            index = server - site.first
            if not 0 <= index < site.servers:
                continue
            for group in range(len(sites.members(site))):
                for name, layout in zip(site.states, site.layouts, strict=True):
                    if (name, group) not in self.cells:
                        self.cells[name, group] = _cell(name, group, layout, index, leaves[name])

    def __iter__(self) -> Iterator[tuple[StateCell, Shard]]:
        for cell in self.cells.values():
            for shard in cell.units.values():
                yield cell, shard

    def put(self, cell: StateCell, unit: int, slot: int, array: Array) -> None:
        """Set a slot of a unit. The store owns `array` from now on, unless the cell is shared.

        Args:
            cell: The state.
            unit: The number of the unit.
            slot: The index of the slot.
            array: The elements, in the slot's dtype. If the cell is shared, they are copied.
        """
        shard = cell.units[unit]
        current = shard.slots[slot]
        if cell.shared and current is not None:
            np.copyto(current, array)
        else:
            shard.slots[slot] = array

    def put_scalar(self, cell: StateCell, index: int, value: Array) -> None:
        """Set the leaf `index` of a state, a scalar, which is stored with every unit."""
        number = cell.layout.scalars.index(index)
        for shard in cell.units.values():
            shard.scalars[number] = value.reshape(()).copy()


def _cell(name: str, group: int, layout: StateLayout, server: int, leaves: tuple[Leaf, ...]) -> StateCell:
    """A state without values; server: the index of this server among those that hold the state."""
    cell = StateCell(name, group, layout)
    scalars = tuple(leaves[leaf].dtype for leaf in layout.scalars)
    for unit in layout.owned(server):
        dtypes = tuple(parts[unit.part].dtype for parts in layout.slots)
        cell.units[unit.number] = Shard(unit, dtypes, scalars, [None] * len(dtypes), [None] * len(scalars))
    return cell


def converted(array: Array, dtype: DType) -> Array:
    """`array` as `dtype`, rounded to nearest even; `array` itself if it has this dtype."""
    target = numpy_dtype(dtype)
    if array.dtype == target:
        return array
    with np.errstate(all="ignore"):
        return array.astype(target)
