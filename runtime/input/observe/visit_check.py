"""The run-time check of a visit: compares the records of each epoch with those that the plan promises.

`commplan.input.visit_audit` defines the sums that are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from commplan.input.order import Order
from commplan.input.visit_audit import EpochContext, EpochTally, check, expected_sums
from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import HostBatch, Visit
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import Coords, HostProgram
from commplan.runtime.input.unit_batches import UnitRecords

_AT_ONCE = 2048  # minimum number of records that are summed together: a call of NumPy costs as much for a few


@dataclass
class Checks:
    """Sums the ids of records that are handed out, by load and member, in constant memory.

    Attributes:
        program: the host program.
        orders: the order of records of each load, by its result.
        steps: the number of steps of an epoch.
        start: the first step of the current epoch. An earlier run may have begun the first epoch; 0 later.
        meter: counts the records that are compared.
    """

    program: HostProgram
    orders: Mapping[Ref, Order]
    steps: int
    start: int
    meter: Meter
    _tallies: dict[tuple[Ref, Coords], EpochTally] = field(
        default_factory=dict[tuple[Ref, Coords], EpochTally]
    )
    _upto: int = -1  # the last step in the tallies; -1 if there is none
    # The visits of later steps, by step.
    _waiting: dict[int, Sequence[Visit] | UnitRecords] = field(
        default_factory=dict[int, "Sequence[Visit] | UnitRecords"]
    )
    _finished: int = -1  # the last epoch that was compared

    def add(self, batch: HostBatch) -> None:
        """Add the records of a batch. Each step counts once: an interrupted caller may report a batch again.

        Raises:
            CommplanError: CP0763 at the end of an epoch whose records differ from those that the plan
                promises.
        """
        if batch.epoch <= self._finished:
            return
        visits, step = batch.visits, batch.step
        count = visits.size if isinstance(visits, UnitRecords) else sum(v.records.size for v in visits)
        if step > self._upto:
            self._waiting[step] = visits
            if len(self._waiting) * count >= _AT_ONCE:
                self._settle()
        self.meter.checked += count
        if step == self.steps - 1:
            self._finish(batch.epoch)

    def _settle(self) -> None:
        """Add the waiting visits to the tallies. An interruption leaves everything unchanged."""
        reports: dict[tuple[Ref, Coords], list[Visit]] = {}
        waiting = (v.visits() if isinstance(v, UnitRecords) else v for v in self._waiting.values())
        for visit in itertools.chain.from_iterable(waiting):
            reports.setdefault((visit.load, visit.coords), []).append(visit)
        tallies = dict(self._tallies)
        for key, visits in reports.items():
            tally = tallies[key] = copy.copy(tallies.get(key) or EpochTally())
            tally.add(np.concatenate([visit.records for visit in visits]), sum(v.skipped for v in visits))
        upto = max(self._waiting, default=self._upto)
        self._tallies, self._upto, self._waiting = tallies, upto, {}

    def _finish(self, epoch: int) -> None:
        """Compare the sums of an epoch with the promise of each load, and begin the next epoch.

        Raises:
            CommplanError: CP0763 if they differ.
        """
        self._settle()
        program = self.program
        for flow in program.flows:
            for read in flow.reads:
                for coords in program.variants(read.per):
                    tally = self._tallies.get((read.result, coords), EpochTally())
                    order = self.orders[read.result]
                    named = dict(zip(read.per, coords, strict=True))
                    promise = expected_sums(
                        order, epoch, program.member(read.per, named) if read.per else None,
                        start=self.start, steps=self.steps,
                        shards=program.shards(flow.split), ways=program.schedule.size(flow.split),
                    )  # fmt: skip
                    whose = " and ".join(f"{axis} {index}" for axis, index in named.items())
                    context = EpochContext(
                        read.source, read.visit, epoch, whose, read.span, program.schedule.file
                    )
                    check(tally, promise, context, order.length)
        self._tallies, self._upto, self.start, self._finished = {}, -1, 0, epoch
