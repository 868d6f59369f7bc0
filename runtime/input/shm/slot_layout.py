"""Offsets in a slot: the notes of the parts, then the arrays of each flow.

A note is the status of a part (`slot_status`). The arrays of a flow are its validity flags, the record
numbers of its loads, and the values that it moves.
"""

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

PAGE = 4096  # bytes


@dataclass(frozen=True)
class ArrayLayout:
    """The offset, shape and dtype of one array in a slot.

    Attributes:
        offset: its byte offset in the slot, a multiple of 64.
        shape: the shape, [copies, rows of a full batch, ...].
        dtype: the dtype.
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
        arrays: the layout of each array, by the id of the value, or the key of flags (`validity`) or record
            numbers (`identity`).
        divisions: the division into parts of each flow that moves values, by the index of the flow; at least
            one. All have the same number of parts.
        nbytes: the size of the slot in bytes, a multiple of `PAGE`.
    """

    arrays: Mapping[Ref, ArrayLayout]
    divisions: Mapping[int, Division]
    nbytes: int

    @property
    def parts(self) -> int:
        """The number of parts of each flow."""
        return next(iter(self.divisions.values())).parts

    def views(self, root: Any, *, writable: bool) -> dict[Ref, Array]:
        """The arrays as views of the slot bytes `root`, which they keep alive."""
        return {ref: layout.view(root, writable=writable) for ref, layout in self.arrays.items()}

    def row_slices(self, root: Any, rows: Mapping[int, int]) -> list[RowSlices]:
        """The slot as a carrier moves it: the notes, then the arrays, as bytes.

        Args:
            root: the bytes of the slot.
            rows: the number of rows of the batch, by the index of each flow in `divisions`.

        Returns:
            For each of them its cells, [copies, rows, bytes of a row], the first row of each part and the
            number of rows.
        """
        cells = np.ndarray((1, self.parts, slot_status.NOTE_NBYTES), np.uint8, root, 0)
        row_slices = [RowSlices(cells, tuple(range(self.parts + 1)))]
        for layout in self.arrays.values():
            row_nbytes = int(np.prod(layout.shape[2:], dtype=np.int64)) * layout.dtype.itemsize
            cells = np.ndarray((*layout.shape[:2], row_nbytes), np.uint8, root, layout.offset)
            division, flow_rows = self.divisions[layout.flow], rows[layout.flow]
            lows = tuple(division.part(flow_rows, part)[0] for part in range(division.parts))
            row_slices.append(RowSlices(cells, (*lows, flow_rows)))
        return row_slices


def slot_layout(program: HostProgram, divisions: Mapping[int, Division]) -> SlotLayout:
    """The slot layout of `program`, equal in every process of the group.

    Args:
        program: the host program.
        divisions: the division into parts of each flow that moves values, by the index of the flow.
    """
    arrays: dict[Ref, ArrayLayout] = {}
    offset = rounded(next(iter(divisions.values())).parts * slot_status.NOTE_NBYTES)
    moving = [(index, flow) for index, flow in enumerate(program.flows) if flow.moved]
    for array_specs in (_records, _values):  # the records of all flows are contiguous: one copy reads them
        for index, flow in moving:
            for ref, shape, dtype in array_specs(program, flow):
                arrays[ref] = ArrayLayout(offset, shape, dtype, index)
                offset += rounded(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return SlotLayout(arrays, divisions, rounded(offset, PAGE))


_ArraySpec = tuple[Ref, tuple[int, ...], np.dtype[Any]]  # the key, shape and dtype of an array


def _records(program: HostProgram, flow: Flow) -> Iterator[_ArraySpec]:
    """The validity flags of a flow, and the record numbers of each of its loads."""
    rows = len(program.rows(flow, flow.batch))
    yield validity(flow), (len(program.variants(flow.per)), rows), np.dtype(np.uint8)
    for read in flow.reads:
        yield identity(read), (len(program.variants(read.per)), rows), np.dtype(np.int64)


def _values(program: HostProgram, flow: Flow) -> Iterator[_ArraySpec]:
    """The moved values of a flow."""
    rows = len(program.rows(flow, flow.batch))
    for ref in flow.moved:
        element = program.elements[ref]
        if isinstance(element, ArrayType):
            shape = (len(program.variants(program.copies[ref])), rows, *element.shape)
            yield ref, shape, numpy_dtype(element.dtype)
