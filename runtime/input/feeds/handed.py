"""The outputs of a phase for a member, and a fast path for batches that consist of one unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.runtime.input.feeds.batch import Batch
from commplan.runtime.input.host_batch import HostBatch, Visit
from commplan.runtime.input.layout import Bools
from commplan.runtime.input.program import HostProgram, identity
from commplan.runtime.input.shm.slot_layout import SlotLayout


def handed_out(program: HostProgram) -> list[tuple[str, Ref, bool]]:
    """List the outputs of a phase that a member receives.

    Returns:
        For each output its name, its value, and whether the value has a dimension for the member.

    Raises:
        CommplanError: CP0932 if a device function computes an output.
    """
    phase, schedule = program.phase, program.schedule
    bindings = {b.name: b.value for b in (*phase.outputs, *phase.takes) if b.source_only}
    for name, ref in bindings.items():
        if ref not in program.roots:
            fail(
                "CP0932",
                f"`{name}` of phase `{phase.name}` is made by a function of the device, and a feed has none",
                "output what that function is given, and call it in the training step",
                span=phase.span,
                file=schedule.file,
            )
    return [(name, ref, bool(program.per(ref))) for name, ref in bindings.items()]


class _Load(NamedTuple):
    """The record numbers of a load in a slot.

    Attributes:
        ref: the load.
        at: the byte offset of the record numbers in the slot.
        rows: the number of rows of a batch.
        counted: the number of rows that are not padding.
    """

    ref: Ref
    at: int
    rows: int
    counted: int


class _Table(NamedTuple):
    """The layout of all batches with the same number of rows.

    Attributes:
        arrays: name, shape, dtype and byte offset in the slot of each array.
        counts: the outputs that are counts, by name.
        loads: the record numbers of each load.
        mask: which rows are not padding; None if the loads have different numbers of rows.
    """

    arrays: list[tuple[str, tuple[int, ...], np.dtype[Any], int]]
    counts: dict[str, npt.NDArray[np.int32]]
    loads: list[_Load]
    mask: Bools | None


class OneUnit:
    """Creates batches that are one unit without skipped records or private work: the arrays in the slot.

    Args:
        program: the host program of the member.
        orders: the orders of records.
        layout: the layout of a slot.
        steps: the number of steps of an epoch.
        wanted: the result of `handed_out`.
    """

    def __init__(
        self, program: HostProgram, orders: Mapping[Ref, Order], layout: SlotLayout, steps: int,
        outputs: Sequence[tuple[str, Ref, bool]],
    ) -> None:  # fmt: skip
        self._program, self._orders, self._layout, self._outputs = program, orders, layout, outputs
        self._last_step = steps - 1
        self._full, self._last = (
            self._table(0),
            self._table(steps - 1),
        )  # only the last batch may have fewer rows
        self._seeds = {read.result: read.seed for flow in program.flows for read in flow.reads}
        self._ids: dict[int, bytes] = {}  # the bytes with record numbers of each batch, by step
        arrays = [layout.arrays[identity(read)] for flow in program.flows for read in flow.reads]
        self._from = min(room.offset for room in arrays)
        self._upto = max(room.offset + room.shape[1] * room.dtype.itemsize for room in arrays)

    def _table(self, step: int) -> _Table:
        layouts, counts = self._layout.arrays, dict[Ref | None, int]()
        arrays: list[tuple[str, tuple[int, ...], np.dtype[Any], int]] = []
        loads: list[_Load] = []
        rows = [self._orders[flow.reads[0].result].rows(step) for flow in self._program.flows]
        for place, flow in enumerate(self._program.flows):
            for read in flow.reads:
                counted = counts[read.count] = self._orders[read.result].counted(step)
                loads.append(_Load(read.result, layouts[identity(read)].offset, rows[place], counted))
        for name, ref, _ in self._outputs:
            if ref not in counts:
                room = layouts[ref]
                arrays.append((name, (rows[room.flow], *room.shape[2:]), room.dtype, room.offset))
        numbers = {name: np.asarray(counts[ref], np.int32) for name, ref, _ in self._outputs if ref in counts}
        for number in numbers.values():
            number.flags.writeable = False
        mask = None
        if len(set(rows)) == 1:
            mask = np.arange(rows[0]) < min(load.counted for load in loads)
            mask.flags.writeable = False
        return _Table(arrays, numbers, loads, mask)

    def batch(self, root: Any, epoch: int, step: int) -> Batch:
        """Create a batch.

        Args:
            root: the bytes of the slot. The arrays keep a reference to them.
            epoch: the epoch.
            step: the step.
        """
        table = self._full if step < self._last_step else self._last
        batch = Batch(table.counts)
        for name, shape, dtype, offset in table.arrays:
            array = batch[name] = np.ndarray(shape, dtype, root, offset)
            array.setflags(write=False)
        batch.place(epoch, step, table.mask)
        self._ids[step] = memoryview(root)[self._from : self._upto].tobytes()
        return batch

    def visits(self, epoch: int) -> HostBatch | None:
        """Collect the records of all batches since `forget`.

        Returns:
            One batch without arrays at the position of the last of them; None if there are none.
        """
        if not self._ids:
            return None
        steps, ids = list(self._ids), list(self._ids.values())
        tables = [self._full if step < self._last_step else self._last for step in steps]
        visits = tuple(
            Visit(load.ref, (), np.concatenate([
                np.frombuffer(data, np.int64, table.loads[place].counted, load.at - self._from)
                for data, table in zip(ids, tables, strict=True)
            ]), 0)
            for place, load in enumerate(self._full.loads)
        )  # fmt: skip
        return HostBatch({}, {}, self._seeds, epoch, max(steps), 0, visits)

    def forget(self) -> None:
        self._ids = {}


def is_one_unit(program: HostProgram, each: int) -> bool:
    """Whether `OneUnit` can create the batches of a member that takes `each` units per step."""
    return each == 1 and all(flow.moved and not flow.after and not flow.per for flow in program.flows)
