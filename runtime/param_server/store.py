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
_MAX_FREE = 64  # maximum number of free buffers of one size


class Pool:
    """Memory for messages. It is reused, because touching fresh pages would take longer than the work."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}

    def take(self, nbytes: int) -> Array:
        """u8 [nbytes], aligned, with undefined content."""
        free = self._free.get(nbytes)
        return free.pop() if free else aligned((nbytes,), _BYTE)

    def give(self, buffer: Array) -> None:
        """Return `buffer`, which came from `take`, to the pool. It must not be used any more."""
        free = self._free.setdefault(buffer.size, [])
        if len(free) < _MAX_FREE:
            free.append(buffer)


def raw(array: Array) -> Array:
    """The bytes of a contiguous array, u8 [nbytes], without a copy."""
    return array.reshape(-1).view(np.uint8)


@dataclass
class Shard:
    """One unit of a state: a flat array for each slot, and scalars; None if they are not set.

    Attributes:
        unit: The unit.
        dtypes, scalar_dtypes: The dtypes of the slots and of the scalars.
        slots, scalars: The arrays.
        version: How often it was set, updated or pulled.
        updates: How often it was updated.
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
        """The array of its only slot."""
        array = self.slots[0]
        assert array is not None, "used before it was set"
        return array


@dataclass
class StateCell:
    """A state of one group of workers on this server.

    `shared` is whether other processes write it, too, so that its arrays must not move.
    """

    name: str
    group: int
    layout: StateLayout
    units: dict[int, Shard] = field(default_factory=dict[int, Shard])
    shared: bool = False

    @property
    def is_complete(self) -> bool:
        return all(shard.is_complete for shard in self.units.values())


class Store:
    """All states of server `server`, counted over all declarations.

    `leaves` are those of each state on a server, by name.
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
        """Set a slot of a unit. The store owns `array` from now on, unless the cell is shared."""
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


def _cell(name: str, group: int, layout: StateLayout, index: int, leaves: tuple[Leaf, ...]) -> StateCell:
    cell = StateCell(name, group, layout)
    scalars = tuple(leaves[index].dtype for index in layout.scalars)
    for unit in layout.owned(index):
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
