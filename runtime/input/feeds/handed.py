"""What of a phase a member is handed, and how a batch that is one unit becomes that without further work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import HostBatch, Visit
from commplan.runtime.input.layout import Array
from commplan.runtime.input.program import HostProgram, identity, validity


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
    """Batches that are a unit each, of which the member makes nothing: the arrays in the slot, as they
    lie."""

    program: HostProgram
    orders: Mapping[Ref, Order]
    _counts: dict[tuple[Ref, int], npt.NDArray[np.int32]] = field(
        default_factory=dict[tuple[Ref, int], npt.NDArray[np.int32]]
    )

    def __post_init__(self) -> None:
        flows = self.program.flows
        self._valid = [validity(flow) for flow in flows]
        self._moved = [ref for flow in flows for ref in flow.moved if ref in self.program.roots]
        self._reads = [
            (read, identity(read), self.orders[read.result]) for flow in flows for read in flow.reads
        ]
        self._seeds = {read.result: read.seed for read, _, _ in self._reads}

    def batch(self, views: Mapping[Ref, Array], epoch: int, step: int, number: int) -> HostBatch | None:
        """The batch in a slot that `views` show; None where records in it were skipped."""
        rows = self._reads[0][2].rows(step)
        if not all(views[ref][0, :rows].all() for ref in self._valid):
            return None
        values = {ref: views[ref][0, :rows] for ref in self._moved}
        records: dict[Ref, npt.NDArray[np.int64]] = {}
        visits: list[Visit] = []
        for read, ids, order in self._reads:
            own = records[read.result] = views[ids][0, :rows].copy()
            counted = order.counted(step)
            visits.append(Visit(read.result, (), own[:counted], 0))
            if read.count in self.program.roots:
                values[read.count] = self._count(read.count, counted)
        return HostBatch(values, records, self._seeds, epoch, step, number, tuple(visits))

    def _count(self, ref: Ref, counted: int) -> npt.NDArray[np.int32]:
        if (ref, counted) not in self._counts:
            self._counts[ref, counted] = np.asarray(counted, np.int32)
            self._counts[ref, counted].flags.writeable = False
        return self._counts[ref, counted]


def is_one_unit(program: HostProgram, each: int) -> bool:
    """Whether `OneUnit` makes the batches of a member that takes `each` units a step."""
    return each == 1 and all(flow.moved and not flow.after and not flow.per for flow in program.flows)
