"""Batches that are one unit of a ring: views of its slot.

`BatchWindow` and the members of feeds use them if no record of the unit was skipped and the process runs no
stages itself. All facts that depend only on the number of rows are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.ir.schedule import Share
from commplan.runtime.input.host_batch import FlowState, HostBatch, Mask, Visit, count, layout, mask, smallest
from commplan.runtime.input.layout import Array, Bools, Fresh, aligned
from commplan.runtime.input.program import Coords, HostProgram, identity
from commplan.runtime.input.shm.slot_layout import ArrayLayout, SlotLayout


class _View(NamedTuple):
    """An array in a slot.

    Attributes:
        ref: the value.
        shape: its shape in a batch.
        dtype: its dtype.
        offset: its byte offset in the slot.
        is_copied: whether the batch has a copy, which does not keep the slot from reuse.
    """

    ref: Ref
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    is_copied: bool


class _Load(NamedTuple):
    """The record numbers of a load in a slot.

    Attributes:
        ref: the load.
        coords: for each copy, the member's index along each axis of `Read.per`.
        shape: [copies, rows of a full batch].
        leading: the sizes of the leading dimensions in a batch, whose product is the number of copies.
        offset: the byte offset of the numbers in the result of `UnitBatches.identities`.
        rows: the number of rows of the batch.
        counted: [rows], whether the row counts by the contract of the load's visit; a slice if all rows
            count.
    """

    ref: Ref
    coords: Sequence[Coords]
    shape: tuple[int, int]
    leading: tuple[int, ...]
    offset: int
    rows: int
    counted: Bools | slice

    def records(self, data: bytes) -> npt.NDArray[np.int64]:
        """The numbers in the result of `UnitBatches.identities`: [copies, rows]."""
        return np.ndarray(self.shape, np.int64, data, self.offset)[:, : self.rows]

    def visits(self, data: bytes) -> list[Visit]:
        """The visits in the result of `UnitBatches.identities`."""
        records = self.records(data)
        return [Visit(self.ref, each, records[i][self.counted], 0) for i, each in enumerate(self.coords)]


class _Received(NamedTuple):
    """A shared value, some of whose rows other processes make.

    Attributes:
        share: the value.
        each: the bytes of a row.
        rows: the number of rows of a batch.
        parts: the number of rows of each part.
    """

    share: Ref
    each: int
    rows: int
    parts: list[int]


class UnitTable(NamedTuple):
    """The facts of all units with the same number of rows.

    Attributes:
        views: the arrays of a batch.
        counts: the counts of a batch, read-only.
        loads: the record numbers of each load.
        received: the shared values.
        mask: the rows that count; None if loads differ in rows or in the axes that split them.
        size: the number of records that count, over all loads and members.
        tally: [parts + 1], for each part the number of batches for which this process made it, then the
            number of batches that it received. `Receipts` changes it.
    """

    views: list[_View]
    counts: dict[Ref, Array]
    loads: dict[Ref, _Load]
    received: list[_Received]
    mask: Mask | None
    size: int
    tally: list[int]

    def visits(self, data: bytes) -> list[Visit]:
        """The visits in the result of `UnitBatches.identities`."""
        return [visit for load in self.loads.values() for visit in load.visits(data)]


class UnitRecords(Mapping[Ref, npt.NDArray[np.int64]]):
    """The record numbers of a batch by load, unpacked when they are read: few programs read them.

    Args:
        table: the facts of the unit.
        data: the result of `UnitBatches.identities`.

    Attributes:
        size: the number of records that count as visited.
    """

    __slots__ = ("_data", "_table", "size")

    def __init__(self, table: UnitTable, data: bytes) -> None:
        self._table, self._data, self.size = table, data, table.size

    def __getitem__(self, ref: Ref) -> npt.NDArray[np.int64]:
        load = self._table.loads[ref]
        return load.records(self._data).reshape(*load.leading, load.rows)

    def __iter__(self) -> Iterator[Ref]:
        return iter(self._table.loads)

    def __len__(self) -> int:
        return len(self._table.loads)

    def visits(self) -> list[Visit]:
        """The records that count as visited: `size` in total."""
        return self._table.visits(self._data)


@dataclass
class Receipts:
    """The costs of receiving units, counted by the one thread that receives them.

    Attributes:
        tables: the facts of full units and of the last unit of an epoch.
        key: the id of the value in whose plan line waits are reported; "" in a single process.
        waited_s: seconds that the caller has waited for units.
        upto: the number of the last batch that was counted; -1 before the first.
    """

    tables: Sequence[UnitTable]
    key: Ref = ""
    waited_s: float = 0.0
    upto: int = -1

    def count(self, table: UnitTable, number: int, parts: Sequence[int]) -> None:
        """Count a batch that this process received.

        Args:
            table: the facts of the unit.
            number: the number of the batch. A number that has just been counted is not counted again.
            parts: the parts that this process made.
        """
        if number != self.upto:  # an interrupted caller calls again
            self.upto = number
            table.tally[-1] += 1
            for part in parts:
                table.tally[part] += 1

    def costs(self) -> Iterator[tuple[Ref, dict[str, float]]]:
        """The waits, and the rows that other processes made, by value (see `Meter.counters`).

        Yields:
            The id of a value, and amounts by name: seconds, records and bytes.
        """
        yield self.key, {"wait_s": self.waited_s}
        for table in self.tables:
            for share, each, rows, sizes in table.received:
                made_rows = sum(size * number for size, number in zip(sizes, table.tally[:-1], strict=True))
                records = rows * table.tally[-1] - made_rows
                yield share, {"records": records, "nbytes": records * each}


class UnitBatches:
    """Makes batches of units of one program.

    Args:
        program: the host program, all of whose stages are in the ring (see `are_units`).
        orders: the orders of records.
        layout: the layout of a slot.
        steps: the number of steps of an epoch.
        memory: allocates the arrays of values that are copied.

    Attributes:
        seeds: the seed of each load.
        receipts: the costs of receiving units.
    """

    def __init__(
        self, program: HostProgram, orders: Mapping[Ref, Order], layout: SlotLayout, steps: int,
        memory: Fresh = aligned,
    ) -> None:  # fmt: skip
        self._program, self._orders, self._layout, self._memory = program, orders, layout, memory
        reads = [read for flow in program.flows for read in flow.reads]
        # One range of the slot has the record numbers of all loads (see `slot_layout`): it is copied at once.
        identities = [layout.arrays[identity(read)] for read in reads]
        self._from = min(room.offset for room in identities)
        self._upto = max(room.offset + _nbytes(room) for room in identities)
        self.seeds = {read.result: read.seed for read in reads}
        self._last_step = steps - 1  # only the last batch may have fewer rows
        self._full, self._last = self._table(0), self._table(steps - 1)
        self.receipts = Receipts((self._full, self._last))

    @property
    def are_views(self) -> bool:
        """Whether the slot has all values of the program in the layout of a batch."""
        tables = (self._full, self._last)
        return all(len(table.views) + len(table.counts) == len(self._program.roots) for table in tables)

    def table(self, step: int) -> UnitTable:
        """The facts of the batch at `step`."""
        return self._full if step < self._last_step else self._last

    def _table(self, step: int) -> UnitTable:
        """Compute the facts of the batch at `step`."""
        program, arrays = self._program, self._layout.arrays
        states = [self._state(index, step) for index in range(len(program.flows))]
        views: list[_View] = []
        counts: dict[Ref, Array] = {}
        loads: dict[Ref, _Load] = {}
        received: list[_Received] = []

        # The record numbers and counts of each load, and the shared values.
        for index, state in enumerate(states):
            rows, cut = len(state.rows), self._layout.divisions[index]
            for read in state.flow.reads:
                room, per = arrays[identity(read)], read.per
                counted = state.counts[read.result]
                loads[read.result] = _Load(
                    read.result, program.variants(per), (room.shape[0], room.shape[1]),
                    tuple(len(program.local[axis]) for axis in per), room.offset - self._from, rows,
                    slice(None) if counted.all() else counted,
                )  # fmt: skip
                if read.count in program.roots:
                    array = counts[read.count] = count(program, state, read, read.count)
                    array.setflags(write=False)
            parts = [high - low for low, high in (cut.part(rows, part) for part in range(cut.parts))]
            for op in state.flow.before:
                if isinstance(op, Share) and op.result in arrays:
                    room = arrays[op.result]
                    received.append(_Received(op.result, _nbytes(room) // room.shape[1], rows, parts))

        # The arrays that are views of the slot, and which of them are copied.
        for ref in program.roots:
            if ref in counts:
                continue
            room = arrays[ref]
            shape = layout(program, ref, room.shape, room.dtype, len(states[room.flow].rows))
            if shape is not None:
                views.append(_View(ref, shape, room.dtype, room.offset, False))
        nbytes = {view.ref: _nbytes(view) for view in views}
        copied = smallest(nbytes, sum(map(_nbytes, arrays.values())))
        views = [view._replace(is_copied=view.ref in copied) for view in views]

        size = sum(np.arange(load.rows)[load.counted].size * len(load.coords) for load in loads.values())
        tally = [0] * (self._layout.parts + 1)
        return UnitTable(views, counts, loads, received, mask(program, states, {}), size, tally)

    def _state(self, index: int, step: int) -> FlowState:
        """The state of a flow in a batch without skipped records."""
        program, flow = self._program, self._program.flows[index]
        rows = program.rows(flow, self._orders[flow.reads[0].result].rows(step))
        counts = {read.result: self._orders[read.result].counts(step)[rows] for read in flow.reads}
        valid = np.ones((len(program.variants(flow.per)), len(rows)), bool)
        return FlowState(flow, rows, {}, counts, {}, valid)

    def identities(self, root: Any) -> bytes:
        """The bytes of a slot with the record numbers of all loads."""
        return memoryview(root)[self._from : self._upto].tobytes()

    def batch(self, root: Any, epoch: int, step: int, number: int, parts: Sequence[int]) -> HostBatch:
        """Make a batch.

        Args:
            root: the bytes of the slot. The arrays keep a reference to them.
            epoch: the epoch.
            step: the step in the epoch.
            number: the number of the batch since the iterator began.
            parts: the parts of the batch that this process made.
        """
        table = self._full if step < self._last_step else self._last
        values: dict[Ref, Array] = dict(table.counts)
        for ref, shape, dtype, offset, is_copied in table.views:
            array: Array = np.ndarray(shape, dtype, root, offset)
            if is_copied:
                view, array = array, self._memory(shape, dtype)
                array[...] = view
            array.setflags(write=False)
            values[ref] = array
        records = UnitRecords(table, self.identities(root))
        self.receipts.count(table, number, parts)
        visits = cast("Any", records)  # pyright sees the linked package as a different one
        return HostBatch(values, records, self.seeds, epoch, step, number, visits, table.mask)


def _nbytes(array: _View | ArrayLayout) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def are_units(program: HostProgram) -> bool:
    """Whether all stages of the batches of `program` run before the slots of the ring."""
    return all(flow.moved and not flow.after for flow in program.flows)
