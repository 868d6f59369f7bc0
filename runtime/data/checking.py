"""The run-time check of a visit: at the end of each epoch, were its records those that the plan promises?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from commplan.input.contract import Tally, Told, check, promised
from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read
from commplan.runtime.data.handing import HostBatch
from commplan.runtime.data.program import Coords, Flow, HostProgram
from commplan.runtime.data.usage import Meter

_AT_ONCE = 2048  # records that are added up together: a few cost NumPy as much as many


@dataclass
class _Account:
    tally: Tally = field(default_factory=Tally)
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list[npt.NDArray[np.int64]])
    waiting: int = 0
    skipped: int = 0

    def add(self, ids: npt.NDArray[np.int64], skipped: int) -> None:
        self.ids.append(ids)
        self.waiting += ids.size
        self.skipped += skipped
        if self.waiting >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        if self.ids:
            self.tally.add(np.concatenate(self.ids), self.skipped)
        self.ids, self.waiting, self.skipped = [], 0, 0


@dataclass
class Checks:
    """Adds up the ids of what is handed out, load by load and member by member, in memory that does not grow.

    start: the first step of the first epoch, which may have been begun by an earlier run.
    """

    program: HostProgram
    orders: Mapping[Ref, Order]
    steps: int
    start: int
    meter: Meter
    _accounts: dict[tuple[Ref, Coords], _Account] = field(default_factory=dict[tuple[Ref, Coords], _Account])

    def add(self, batch: HostBatch) -> None:
        """A batch is handed out. Errors: CP0763 at the end of an epoch that was not what the plan
        promises."""
        for visit in batch.visits:
            account = self._accounts.setdefault((visit.load, visit.coords), _Account())
            account.add(visit.records, visit.skipped)
            self.meter.checked(visit.records.size)
        if batch.step == self.steps - 1:
            self._finish(batch.epoch)

    def _finish(self, epoch: int) -> None:
        accounts, self._accounts = self._accounts, {}
        start, self.start = self.start, 0
        for flow in self.program.flows:
            for read in flow.reads:
                for coords in self.program.variants(read.per):
                    account = accounts.get((read.result, coords), _Account())
                    account.settle()
                    self._check(flow, read, coords, account.tally, epoch, start)

    def _check(self, flow: Flow, read: Read, coords: Coords, tally: Tally, epoch: int, start: int) -> None:
        program, order = self.program, self.orders[read.result]
        member = program.member(read.per, dict(zip(read.per, coords, strict=True))) if read.per else None
        promise = promised(
            order,
            epoch,
            member,
            start=start,
            steps=self.steps,
            shards=program.shards(flow.split),
            ways=program.schedule.size(flow.split),
        )
        whose = " and ".join(f"{axis} {place}" for axis, place in zip(read.per, coords, strict=True))
        told = Told(read.source, read.visit, epoch, whose, read.span, program.schedule.file)
        check(tally, promise, told, order.length)
