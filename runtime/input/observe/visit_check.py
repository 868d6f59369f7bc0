"""The run-time check of a visit: compares the records of each epoch with those that the plan promises."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from commplan.input.order import Order
from commplan.input.visit_audit import EpochContext, EpochTally, check, expected_sums
from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import Coords, HostProgram

_AT_ONCE = 2048  # records that are summed together: NumPy takes as long for a few as for many


class _Account:
    """The records of one load that one member received in one epoch. Each step counts once: after an
    interruption the same batch may be reported again."""

    def __init__(self) -> None:
        self.tally = EpochTally()
        self.upto = -1  # the last step in the tally
        self.waiting: dict[int, tuple[npt.NDArray[np.int64], int]] = {}

    def add(self, step: int, ids: npt.NDArray[np.int64], skipped: int) -> None:
        if step <= self.upto:
            return
        self.waiting[step] = ids, skipped
        if len(self.waiting) * ids.size >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        if not self.waiting:
            return
        reports = self.waiting.values()
        tally = copy.copy(self.tally)
        tally.add(np.concatenate([ids for ids, _ in reports]), sum(skipped for _, skipped in reports))
        upto = max(self.waiting)
        self.tally, self.upto, self.waiting = tally, upto, {}


@dataclass
class Checks:
    """Sums the ids of records that are handed out, by load and member, in constant memory.

    start: the first step of the first epoch, which may have been begun by an earlier run.
    """

    program: HostProgram
    orders: Mapping[Ref, Order]
    steps: int
    start: int
    meter: Meter
    _accounts: dict[tuple[Ref, Coords], _Account] = field(default_factory=dict[tuple[Ref, Coords], _Account])
    _finished: int = -1  # the last epoch that was compared

    def add(self, batch: HostBatch) -> None:
        """Count a batch. Raises CP0763 at the end of an epoch whose records differ from those that the plan
        promises."""
        if batch.epoch <= self._finished:
            return
        count = 0
        for visit in batch.visits:
            account = self._accounts.get((visit.load, visit.coords))
            if account is None:
                account = self._accounts[visit.load, visit.coords] = _Account()
            account.add(batch.step, visit.records, visit.skipped)
            count += visit.records.size
        self.meter.checked(count)
        if batch.step == self.steps - 1:
            self._finish(batch.epoch)

    def _finish(self, epoch: int) -> None:
        program = self.program
        for flow in program.flows:
            for read in flow.reads:
                for coords in program.variants(read.per):
                    account = self._accounts.get((read.result, coords), _Account())
                    account.settle()
                    order = self.orders[read.result]
                    named = dict(zip(read.per, coords, strict=True))
                    promise = expected_sums(
                        order, epoch, program.member(read.per, named) if read.per else None,
                        start=self.start, steps=self.steps,
                        shards=program.shards(flow.split), ways=program.schedule.size(flow.split),
                    )  # fmt: skip
                    whose = " and ".join(f"{axis} {place}" for axis, place in named.items())
                    context = EpochContext(
                        read.source, read.visit, epoch, whose, read.span, program.schedule.file
                    )
                    check(account.tally, promise, context, order.length)
        self._accounts, self.start, self._finished = {}, 0, epoch
