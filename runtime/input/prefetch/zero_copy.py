"""Batches that are handed over as they lie in a slot: all that does not change from one to the next is kept
ready.

Members of an ensemble that only look at what others made are given a batch for the price of a few views, so
that their number does not show in the cost of the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read, Share
from commplan.runtime.input.host_batch import HostBatch, Visit, count, layout
from commplan.runtime.input.layout import Array, Bools
from commplan.runtime.input.program import Coords, Flow, identity, validity
from commplan.runtime.input.shm.shm_channel import SharedRing
from commplan.runtime.input.shm.slot_layout import Room
from commplan.runtime.input.stages.batch_builder import BatchBuilder, BatchFactory, Task


@dataclass(frozen=True)
class _Kept:
    """What batches with the same number of rows have in common, for one flow. names: for each load the
    members that it has ids for. whole: all rows count."""

    valid: Room
    rows: int
    ids: tuple[tuple[Read, Room, list[Coords]], ...]
    views: Mapping[Ref, Room]
    counts: Mapping[Ref, Bools]
    whole: bool
    fixed: Mapping[Ref, Array]
    received: tuple[tuple[Ref, int], ...]  # lines of the plan, and the bytes of a row on each


@dataclass
class Direct:
    """Makes the batches of a ring that is direct."""

    maker: BatchFactory
    exchange: SharedRing
    _seeds: dict[Ref, int] = field(default_factory=dict[Ref, int])
    _orders: list[Order] = field(default_factory=list[Order])
    # By the rows of each load, and how many of them count.
    _kept: dict[tuple[tuple[int, int], ...], tuple[_Kept, ...] | None] = field(
        default_factory=dict[tuple[tuple[int, int], ...], "tuple[_Kept, ...] | None"]
    )

    def __post_init__(self) -> None:
        reads = [read for flow in self.maker.program.flows for read in flow.reads]
        self._seeds = {read.result: read.seed for read in reads}
        self._orders = [self.maker.orders[read.result] for read in reads]

    def batch(self, number: int) -> BatchBuilder:
        return DirectBatch(self.maker, number, *self.maker.course.at(number), [], direct=self)

    def kept(self, step: int) -> tuple[_Kept, ...] | None:
        """For each flow; None where a value is handed over otherwise than it lies in the slot."""
        key = tuple((order.rows(step), order.counted(step)) for order in self._orders)
        if key not in self._kept:
            parts = [self._of(place, flow, step) for place, flow in enumerate(self.maker.program.flows)]
            self._kept[key] = tuple(kept for kept in parts if kept) if all(parts) else None
        return self._kept[key]

    def _of(self, place: int, flow: Flow, step: int) -> _Kept | None:
        maker, rooms = self.maker, self.exchange.rooms.arrays
        program, state = maker.program, maker.state(flow, step)
        rows = len(state.rows)
        views: dict[Ref, Room] = {}
        for ref in maker.roots(flow):
            shape = layout(program, ref, rooms[ref].shape, rows)
            if shape is None:
                return None
            views[ref] = replace(rooms[ref], shape=shape)
        fixed: dict[Ref, Array] = {}
        for read in flow.reads:
            if read.count in program.roots:
                fixed[read.count] = count(program, state, read, read.count)
                fixed[read.count].flags.writeable = False
        received = [
            (op.result, int(np.prod(rooms[op.result].shape, dtype=np.int64)) // rooms[op.result].shape[1]
             * rooms[op.result].dtype.itemsize)
            for op in flow.before
            if isinstance(op, Share) and op.result in flow.moved
        ]  # fmt: skip
        whole = all(counts.all() for counts in state.counts.values())
        ids = tuple((read, rooms[identity(read)], program.variants(read.per)) for read in flow.reads)
        return _Kept(rooms[validity(flow)], rows, ids, views, state.counts, whole, fixed, tuple(received))

    def handed(self, batch: DirectBatch, kept: Sequence[_Kept]) -> HostBatch | None:
        """The batch; None where a record was skipped."""
        memory = self.exchange.slots.memory(batch.number)
        for flow in kept:
            if not _all_valid(memory, flow):
                return None
        root = self.exchange.slots.lend(batch.number)
        values: dict[Ref, Array] = {}
        records: dict[Ref, npt.NDArray[np.int64]] = {}
        visits: list[Visit] = []
        for place, flow in enumerate(kept):
            for ref, room in flow.views.items():
                values[ref] = room.view(root, writable=False)
            values.update(flow.fixed)
            for read, room, variants in flow.ids:
                ids: npt.NDArray[np.int64] = np.ndarray(room.shape, np.int64, root, room.offset)
                ids = ids[:, : flow.rows].copy()
                for row, coords in enumerate(variants):
                    seen = ids[row] if flow.whole else ids[row][flow.counts[read.result]]
                    visits.append(Visit(read.result, coords, seen, 0))
                leading = [len(self.maker.program.local[axis]) for axis in read.per]
                records[read.result] = ids.reshape(*leading, flow.rows) if leading else ids[0]
            self._account(batch, place, flow)
        return HostBatch(values, records, self._seeds, batch.epoch, batch.step, batch.number, tuple(visits))

    def _account(self, batch: DirectBatch, place: int, flow: _Kept) -> None:
        """For what others made."""
        number = flow.rows
        if batch.duties:
            division = self.exchange.division(place, batch.number)
            parts = [part for process in batch.duties for part in division.of(process)]
            number -= sum(high - low for low, high in (division.part(flow.rows, part) for part in parts))
        for key, nbytes in flow.received:
            self.maker.meter.add(key, records=number, nbytes=number * nbytes)


def _all_valid(memory: Any, flow: _Kept) -> bool:
    copies, rows = flow.valid.shape
    start = flow.valid.offset
    if flow.rows == rows:  # one look at bytes is cheaper than an array
        return 0 not in memoryview(memory)[start : start + copies * rows].tobytes()
    valid: Array = np.ndarray(flow.valid.shape, np.uint8, memory, start)
    return bool(valid[:, : flow.rows].all())


@dataclass
class DirectBatch(BatchBuilder):
    """Its second stage is empty, but for batches from which records were skipped."""

    direct: Direct = field(kw_only=True)

    def parts(self, processes: Sequence[int]) -> list[Task]:
        self._states()
        return super().parts(processes)

    def _states(self) -> None:
        if not self.states:
            self.states = [self.maker.state(flow, self.step) for flow in self.maker.program.flows]

    def second(self) -> Sequence[Task]:
        return ()

    def finish(self) -> HostBatch:
        kept = self.direct.kept(self.step)
        batch = self.direct.handed(self, kept) if kept is not None else None
        if batch is not None:
            return batch
        self._states()
        for task in super().second():
            task()
        return super().finish()
