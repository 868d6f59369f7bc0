"""The arrays of a server: its units of every state, and memory for what arrives."""

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
_KEPT = 64  # free buffers of one size


class Pool:
    """Memory for messages, used again: fresh pages cost more than what is done with them."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}

    def take(self, nbytes: int) -> Array:
        """u8 [nbytes], aligned, its content undefined."""
        free = self._free.get(nbytes)
        return free.pop() if free else aligned((nbytes,), _BYTE)

    def give(self, buffer: Array) -> None:
        """Take `buffer`, which came from `take`, back; nobody may read it any more."""
        free = self._free.setdefault(buffer.size, [])
        if len(free) < _KEPT:
            free.append(buffer)


def raw(array: Array) -> Array:
    """The bytes of a contiguous array, u8 [nbytes]; shared."""
    return array.reshape(-1).view(np.uint8)


@dataclass
class Kept:
    """One unit of a state: a flat array for each of its slots, and its scalars; None before they are set.

    version: how often it was set, updated or pulled; updates: how often updated alone.
    """

    unit: StateUnit
    dtypes: tuple[DType, ...]
    scalar_dtypes: tuple[DType, ...]
    slots: list[Array | None]
    scalars: list[Array | None]
    version: int = 0
    updates: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of it is set."""
        return all(array is not None for array in (*self.slots, *self.scalars))

    def arrays(self) -> list[Array]:
        """All of it, where it is set."""
        return [array for array in (*self.slots, *self.scalars) if array is not None]

    def weights(self) -> Array:
        """The unit's elements of its only slot."""
        array = self.slots[0]
        assert array is not None, "asked for before it was set"
        return array


@dataclass
class Cell:
    """A state as one group of workers has it, on this server.

    shared: whether other processes write it too, so that its arrays stay where they are.
    """

    name: str
    group: int
    layout: StateLayout
    units: dict[int, Kept] = field(default_factory=dict[int, Kept])
    shared: bool = False

    @property
    def whole(self) -> bool:
        return all(kept.whole for kept in self.units.values())


class Store:
    """All states of server `server`, counted over all declarations.

    leaves: of each state that lies on a server, by its name.
    """

    def __init__(self, sites: Sites, server: int, leaves: Mapping[str, tuple[Leaf, ...]]) -> None:
        self.cells: dict[tuple[str, int], Cell] = {}
        for site in sites.all:
            own = server - site.first
            if not 0 <= own < site.servers:
                continue
            for group in range(len(sites.members(site))):
                for name, layout in zip(site.states, site.layouts, strict=True):
                    if (name, group) not in self.cells:
                        self.cells[name, group] = _cell(name, group, layout, own, leaves[name])

    def __iter__(self) -> Iterator[tuple[Cell, Kept]]:
        for cell in self.cells.values():
            for kept in cell.units.values():
                yield cell, kept

    def put(self, cell: Cell, unit: int, slot: int, array: Array) -> None:
        """`array` becomes slot `slot` of a unit; it is the store's from now on, unless the cell is shared."""
        kept = cell.units[unit]
        old = kept.slots[slot]
        if cell.shared and old is not None:
            np.copyto(old, array)
        else:
            kept.slots[slot] = array

    def put_scalar(self, cell: Cell, place: int, value: Array) -> None:
        """The leaf `place` of a state, a scalar, which is kept with every unit."""
        number = cell.layout.scalars.index(place)
        for kept in cell.units.values():
            kept.scalars[number] = value.reshape(()).copy()


def _cell(name: str, group: int, layout: StateLayout, own: int, leaves: tuple[Leaf, ...]) -> Cell:
    cell = Cell(name, group, layout)
    scalars = tuple(leaves[place].dtype for place in layout.scalars)
    for unit in layout.owned(own):
        dtypes = tuple(parts[unit.part].dtype for parts in layout.slots)
        cell.units[unit.number] = Kept(unit, dtypes, scalars, [None] * len(dtypes), [None] * len(scalars))
    return cell


def converted(array: Array, dtype: DType) -> Array:
    """`array` as `dtype`, rounded to nearest even where that is narrower; itself if it is that already."""
    wanted = numpy_dtype(dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(all="ignore"):
        return array.astype(wanted)
