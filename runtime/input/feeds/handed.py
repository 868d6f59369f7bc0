"""What of a phase a member is handed, and how a batch that is one unit becomes that without further work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import HostBatch, Visit
from commplan.runtime.input.layout import Array
from commplan.runtime.input.program import HostProgram, identity
from commplan.runtime.input.shm.slot_layout import Room, SlotLayout


def handed_out(program: HostProgram) -> list[tuple[str, Ref, bool]]:
    """Name, value, and whether it has a dimension for the member, of all that is handed out.

    Errors: CP0932 for what a function of the device makes.
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


@dataclass
class OneUnit:
    """Batches that are a unit each, of which no record was skipped and the member makes nothing: the arrays
    in the slot, as they lie. steps: of an epoch."""

    program: HostProgram
    orders: Mapping[Ref, Order]
    layout: SlotLayout
    steps: int
    _counts: dict[tuple[Ref, int], npt.NDArray[np.int32]] = field(
        default_factory=dict[tuple[Ref, int], npt.NDArray[np.int32]]
    )

    def __post_init__(self) -> None:
        flows, roots, rooms = self.program.flows, self.program.roots, self.layout.arrays
        # What a flow hands over, and its loads, with the place of the flow.
        self._moved = [
            (ref, rooms[ref], place) for place, flow in enumerate(flows) for ref in flow.moved if ref in roots
        ]
        self._reads = [
            (read, rooms[identity(read)], place) for place, flow in enumerate(flows) for read in flow.reads
        ]
        self._seeds = {read.result: read.seed for read, _, _ in self._reads}
        self._full, self._last = self._sizes(0), self._sizes(self.steps - 1)  # only the last may be short

    def _sizes(self, step: int) -> tuple[list[int], list[int]]:
        """Rows of the batch of `step`, by flow, and how many of them count, by load."""
        rows = [self.orders[flow.reads[0].result].rows(step) for flow in self.program.flows]
        return rows, [self.orders[read.result].counted(step) for read, _, _ in self._reads]

    def batch(self, root: Any, epoch: int, step: int, number: int) -> HostBatch:
        """The batch in the slot whose bytes are `root`."""
        rows, counts = self._full if step < self.steps - 1 else self._last
        values = {ref: _array(room, root, rows[flow]) for ref, room, flow in self._moved}
        records: dict[Ref, npt.NDArray[np.int64]] = {}
        visits: list[Visit] = []
        for (read, room, flow), counted in zip(self._reads, counts, strict=True):
            own = records[read.result] = np.ndarray(rows[flow], room.dtype, root, room.offset).copy()
            visits.append(Visit(read.result, (), own[:counted], 0))
            if read.count in self.program.roots:
                values[read.count] = self._count(read.count, counted)
        return HostBatch(values, records, self._seeds, epoch, step, number, tuple(visits))

    def _count(self, ref: Ref, counted: int) -> npt.NDArray[np.int32]:
        if (ref, counted) not in self._counts:
            self._counts[ref, counted] = np.asarray(counted, np.int32)
            self._counts[ref, counted].flags.writeable = False
        return self._counts[ref, counted]


def _array(room: Room, root: Any, rows: int) -> Array:
    """The first rows of a value's only copy."""
    array: Array = np.ndarray((rows, *room.shape[2:]), room.dtype, root, room.offset)
    array.setflags(write=False)
    return array


def is_one_unit(program: HostProgram, each: int) -> bool:
    """Whether `OneUnit` makes the batches of a member that takes `each` units a step."""
    return each == 1 and all(flow.moved and not flow.after and not flow.per for flow in program.flows)
