"""Offsets in a slot: the notes of the parts; for each flow, its validity flags and its shared values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from commplan.input.work_partition import Division
from commplan.ir.plan import Ref
from commplan.ir.types import ArrayType
from commplan.runtime.input.layout import Array, rounded
from commplan.runtime.input.program import Flow, HostProgram, identity, validity
from commplan.runtime.input.shm import slot_status
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.input.transport.transport import RowSlices

PAGE = 4096


@dataclass(frozen=True)
class Room:
    """The place of one array in a slot.

    Attributes:
        shape: the shape, [copies, rows, ...].
        flow: the index of its flow in the program.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    flow: int

    def view(self, root: Any, *, writable: bool) -> Array:
        """The array as a view of the slot bytes `root`, which it keeps alive."""
        array: Array = np.ndarray(self.shape, self.dtype, root, self.offset)
        array.flags.writeable = writable
        return array


@dataclass(frozen=True)
class SlotLayout:
    """A slot's layout, each array aligned to 64 bytes. The notes come first, one per part.

    Attributes:
        arrays: the place of each array.
        divisions: the division of each flow with shared values.
        nbytes: the size of the slot, a multiple of the page.
    """

    arrays: Mapping[Ref, Room]
    divisions: Mapping[int, Division]
    nbytes: int

    @property
    def parts(self) -> int:
        """The number of parts of each flow."""
        return next(iter(self.divisions.values())).parts

    def views(self, root: Any, *, writable: bool) -> dict[Ref, Array]:
        """The arrays as views of the slot bytes `root`, which they keep alive."""
        return {ref: room.view(root, writable=writable) for ref, room in self.arrays.items()}

    def parcels(self, root: Any, rows: Mapping[int, int]) -> list[RowSlices]:
        """The slot for a carrier: notes, then the arrays.

        Args:
            rows: the rows of the batch, by flow with shared values.
        """
        cells = np.ndarray((1, self.parts, slot_status.ROOM), np.uint8, root, 0)
        parcels = [RowSlices(cells, tuple(range(self.parts + 1)))]
        for room in self.arrays.values():
            each = int(np.prod(room.shape[2:], dtype=np.int64)) * room.dtype.itemsize
            cells = np.ndarray((*room.shape[:2], each), np.uint8, root, room.offset)
            division, local = self.divisions[room.flow], rows[room.flow]
            lows = tuple(division.part(local, part)[0] for part in range(division.parts))
            parcels.append(RowSlices(cells, (*lows, local)))
        return parcels


def slot_layout(program: HostProgram, divisions: Mapping[int, Division]) -> SlotLayout:
    """The slot layout of `program`, equal in every process of the group."""
    arrays: dict[Ref, Room] = {}
    offset = rounded(next(iter(divisions.values())).parts * slot_status.ROOM)
    moving = [(index, flow) for index, flow in enumerate(program.flows) if flow.moved]
    for array_specs in (_records, _values):  # the records of all flows are contiguous: one copy reads them
        for index, flow in moving:
            for ref, shape, dtype in array_specs(program, flow):
                arrays[ref] = Room(offset, shape, dtype, index)
                offset += rounded(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return SlotLayout(arrays, divisions, rounded(offset, PAGE))


_ArraySpec = tuple[Ref, tuple[int, ...], np.dtype[Any]]


def _records(program: HostProgram, flow: Flow) -> Iterator[_ArraySpec]:
    """The validity flags and record indices of a flow."""
    rows = len(program.rows(flow, flow.batch))
    yield validity(flow), (len(program.variants(flow.per)), rows), np.dtype(np.uint8)
    for read in flow.reads:
        yield identity(read), (len(program.variants(read.per)), rows), np.dtype(np.int64)


def _values(program: HostProgram, flow: Flow) -> Iterator[_ArraySpec]:
    rows = len(program.rows(flow, flow.batch))
    for ref in flow.moved:
        element = program.elements[ref]
        if isinstance(element, ArrayType):
            shape = (len(program.variants(program.copies[ref])), rows, *element.shape)
            yield ref, shape, numpy_dtype(element.dtype)
