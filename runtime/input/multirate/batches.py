"""The batches of one member that goes by its own clock: some units of the common stream, and what it adds."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Self

from commplan.diagnostics import CommplanError
from commplan.runtime.input.epoch_iterator import EpochIterator
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.multirate.schedule import OWN
from commplan.runtime.input.multirate.stream import MultirateStream, StreamOptions, close_on_gc
from commplan.runtime.input.multirate.units import fill
from commplan.runtime.input.observe.accounting import Meter, Summary, merged
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.phase_order import block_of, hints, orders
from commplan.runtime.input.program import EpochCursor, host_program
from commplan.runtime.input.stages.batch_builder import BatchBuilder, BatchFactory
from commplan.runtime.input.stages.functions import called_functions
from commplan.runtime.input.stages.records import stages
from commplan.wait import outcome


class ClockedBatches(EpochIterator):
    """Batches of one member, as `PhaseBatches` gives those of all: one epoch per `iter()`.

    Several members of a process are driven in any interleaving, by one thread or by several. local: as for
    `PhaseBatches`, without the members. state: what `.state()` of this member returned. terms: of the
    stream, where this is the first member.

    Errors: as `PhaseBatches`; CP0946 and CP0947 where the others hold this member back and it would never end
    (both may be caught: the place stays), CP0948 where it has batches already.
    """

    _patient = ("CP0946", "CP0947")  # a member may go on, once another one has

    def __init__(
        self,
        clocks: MultirateStream,
        member: int,
        *,
        local: Mapping[str, Sequence[int]] | None = None,
        state: Mapping[str, int] | None = None,
        terms: StreamOptions | None = None,
    ) -> None:
        plan = clocks.plan
        super().__init__(plan.phase)
        self.member, self._clocks = member, clocks
        self._local = {**(local or {}), plan.clock: (member,)}
        self._meter, self._lone = (Meter(plan.phase, plan.schedule.plan) for _ in range(2))
        self._private: PhaseBatches | None = self._alone(state)
        steps, place = self._private.steps, self._private.state()
        self._start(**place, steps=steps)
        self._each = plan.rates.units[member]
        self._maker, self._threads = self._makes(EpochCursor(place["epoch"], place["step"], steps))
        # What the member is given is checked whole, wherever it comes from; it is counted where it is made.
        self._checks = Checks(
            self._maker.program, self._maker.orders, steps, place["step"], Meter(plan.phase)
        )
        self._ahead: tuple[BatchBuilder, list[Future[None]]] | None = None
        self._hand = clocks.open(member, self._position(self._place), terms or StreamOptions())
        self._closing = weakref.finalize(self, close_on_gc, clocks, self._hand)

    # --- what `PhaseBatches` has as well ---

    def __iter__(self) -> Self:
        if self._closing.alive:
            self._clocks.begin(self._hand)
        return super().__iter__()

    def _await_due(self) -> HostBatch:
        self._clocks.begin(self._hand)
        if self._due is None:
            self._due = self._taken()
        return self._due

    def _pass_on(self, place: int) -> None:
        finished = place // self._steps > self._armed
        self._clocks.passed(self._hand, self._position(place), finished=finished)
        if not finished:
            self._begin_ahead(place)

    @property
    def meters(self) -> tuple[Meter, ...]:
        """Of its own work, of what it read by itself, and of what members of this process have in common."""
        return self._meter, self._lone, self._clocks.meter

    def summary(self) -> Summary:
        """What the input cost so far: its own work, and what all members of the process have in common."""
        return merged(meter.summary() for meter in self.meters)

    def close(self) -> None:
        """Stop; the others no longer wait for this member. Closing twice is fine."""
        if os.getpid() != self._process or self._closing.detach() is None:
            return
        self._due = None
        self._drop_ahead()
        if self._private is not None:
            self._private.close()
        self._clocks.leave(self._hand)

    # --- how ---

    def _position(self, place: int) -> int:
        """The first unit of the batch at `place`."""
        epoch, step = divmod(place, self._steps)
        return epoch * self._clocks.epoch + step * self._each

    def _alone(self, state: Mapping[str, int] | None) -> PhaseBatches:
        plan = self._clocks.plan
        schedule = plan.member(self.member, alone=True)
        return PhaseBatches(
            schedule, plan.phase, self._clocks.sources, self._clocks.functions,
            local=self._local, state=state, meter=self._lone,
        )  # fmt: skip

    def _makes(self, course: EpochCursor) -> tuple[BatchFactory, int]:
        """What makes batches from units, and how many threads help."""
        clocks, plan = self._clocks, self._clocks.plan
        schedule = plan.member(self.member)
        program = host_program(schedule, plan.phase, self._local, apart=True)
        functions = called_functions(program, clocks.functions)
        stage_of = stages(program, clocks.sources, functions, self._meter)
        _, cores = hints(program)
        block = block_of(program, cores)
        maker = BatchFactory(
            program, orders(program, clocks.sources), stage_of, self._meter, block, course=course
        )
        return maker, cores if any(flow.after for flow in program.flows) else 0

    def _taken(self) -> HostBatch:
        if self._clocks.behind(self._hand):
            self._drop_ahead()
            return self._by_itself()
        if self._private is not None:
            self._private.close()
            self._private = None
        ready, asked = int(self._ahead is not None), time.perf_counter()
        if self._ahead is None:
            self._ahead = self._begun(self._place, wait=True)
        if self._ahead is None:
            self._refuse_closed()
        making, tasks = self._ahead
        try:
            for task in tasks:
                outcome(task)
        finally:
            self._ahead = None
        batch = making.finish()
        self._meter.checked(sum(visit.records.size for visit in batch.visits))
        self._meter.handed_out(ready, time.perf_counter() - asked, first=self._place % self._steps == 0)
        return batch

    def _by_itself(self) -> HostBatch:
        """The next batch, read by this member alone."""
        if self._private is None or self._private.state() != self.state():
            if self._private is not None:
                self._private.close()
            self._private = self._alone(self.state())
        batch = next(iter(self._private))
        reads = [read.result for flow in self._maker.program.flows for read in flow.reads]
        named = {ref.removesuffix(OWN): ref for ref in reads}
        visits = (visit._replace(load=named.get(visit.load, visit.load)) for visit in batch.visits)
        return dataclasses.replace(batch, visits=tuple(visits))

    def _begin_ahead(self, place: int) -> None:
        """Begin with the batch at `place` where that asks for no waiting."""
        if self._threads and self._ahead is None and not self._clocks.behind(self._hand):
            self._ahead = self._begun(place, wait=False)

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        for task in ahead[1] if ahead else ():
            task.cancel()

    def _begun(self, place: int, *, wait: bool) -> tuple[BatchBuilder, list[Future[None]]] | None:
        """The batch at `place` in the making, and what is still to be done for it."""
        end = (place // self._steps + 1) * self._clocks.epoch
        count = min(self._each, end - self._position(place))
        try:
            units = self._clocks.take(self._hand, count, wait=wait)
        except CommplanError:
            if wait:
                raise
            return None  # it is raised when its turn comes
        if units is None:
            return None
        making = self._maker.batch(place - self._first)
        values = [unit.values for unit in units]
        making.moved = {
            ref: array
            for state in making.states
            for ref, array in fill(state, values, state.flow.batch // self._each).items()
        }
        todo = making.second()
        if not self._threads:
            for task in todo:
                task()
            return making, []
        pool = self._clocks.pool(self._threads)
        return making, [pool.submit(task) for task in todo]
