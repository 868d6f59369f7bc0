"""Iterator over the batches of one phase, in an order that only the plan determines."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from commplan.input.prefetch import CARRIED, KEEP, device_prefetch, slots
from commplan.ir.schedule import Schedule
from commplan.recorder.file import Call
from commplan.runtime.input.epoch_iterator import EpochIterator
from commplan.runtime.input.group import Group
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.layout import aligned
from commplan.runtime.input.observe.accounting import Meter, Queue, Summary
from commplan.runtime.input.observe.batch_record import batch_record
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.observe.wait_log import PATIENCE_S
from commplan.runtime.input.phase_order import (
    block_of,
    epoch_steps,
    fingerprint,
    hints,
    ops_of,
    orders,
    restored,
)
from commplan.runtime.input.prefetch.prefetch import Prefetcher
from commplan.runtime.input.program import EpochCursor, HostProgram, host_program
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.ring.forming import form
from commplan.runtime.input.ring.producers import Recording
from commplan.runtime.input.shm.arena import Arena
from commplan.runtime.input.sources import adapters as _adapters
from commplan.runtime.input.sources import files as _sources
from commplan.runtime.input.stages.batch_builder import BatchBuilder, BatchFactory
from commplan.runtime.input.stages.functions import called_functions, workers_of
from commplan.runtime.input.stages.records import stages

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning


@dataclass
class _Cursor:
    """Starts batches ahead, up to the end of epoch `until`."""

    make: Callable[[int], BatchBuilder]
    course: EpochCursor
    until: int

    def start(self, number: int) -> BatchBuilder | None:
        return None if self.course.at(number)[0] > self.until else self.make(number)


class PhaseBatches(EpochIterator):
    """Batches of one phase, one epoch per `iter()`.

    `for batch in batches` runs to the end of the current epoch; the next `for` runs the next epoch. Threads
    work ahead: `prefetch` batches and `cores` threads, from the braces of loads and maps; by default 2
    batches and one thread per CPU up to 8. They end with `close`, with a `with` block, when the object is
    collected, and at interpreter exit. Waiting uses no CPU. Several threads may call `next`: each batch goes
    to one of them.

    Args:
        schedule: the schedule with the phase.
        phase: the name of the phase.
        sources: sources by their names in the plan, called from several threads.
        functions: host functions by their names in the plan, called from several threads. Device functions
            are ignored. A random host function takes the keyword `rng`, a `numpy.random.Generator`:
            `augment(pixels, rng)`.
        local: the indices that this process holds along each axis, such as
            `{"member": (1,), "data": (0, 1, 2, 3)}`; all indices for None or an omitted axis.
        group: the processes that share values, which hold the same indices along every other axis. If None,
            each process makes all its values.
        state: a result of `.state()`, possibly with another number of ranks or another design; None for the
            start of epoch 0.
        workers: "threads", or "processes" for functions that hold the interpreter lock.
        timeout: seconds that one call of a source or a host function may take; the group's timeout replaces
            it.
        pinning: registers the memory of batches with the devices that they are copied to, if they are taken
            ahead.

    Raises:
        CommplanError: CP09xx. Errors of sources, functions, state and designs are raised here; errors of a
            record or a peer are raised by the `next` that would have returned its batch.
    """

    def __init__(
        self,
        schedule: Schedule,
        phase: str,
        sources: Mapping[str, object],
        functions: Mapping[str, Callable[..., Any]],
        *,
        local: Mapping[str, Sequence[int]] | None = None,
        group: Group | None = None,
        state: Mapping[str, int] | None = None,
        workers: str = "threads",
        timeout: float = PATIENCE_S,
        pinning: Pinning | None = None,
    ) -> None:
        super().__init__(phase)
        apart = group is not None and group.count > 1
        program = host_program(schedule, phase, local, apart=apart)
        read = [read.source for flow in program.flows for read in flow.reads]
        bound_sources = _sources.bound(schedule, sources, read)
        chosen = called_functions(program, functions)
        self._orders = orders(program, bound_sources)
        self._program = program
        steps, order = epoch_steps(program, self._orders), fingerprint(program, self._orders)
        course = EpochCursor(*restored(program, self._orders, state, steps, order), steps)
        self._start(course.epoch, course.step, steps, order)
        self._meter = Meter(phase, schedule.plan)
        stage_of = stages(program, bound_sources, chosen, self._meter)
        prefetch, cores = hints(program)
        block = block_of(program, cores)
        self.on_devices = device_prefetch(ops_of(program))
        self.pinning = pinning = pinning if self.on_devices else None
        crew = workers_of(workers, cores, program, bound_sources, chosen, block, self._meter, pinning)
        by_caller = group is not None and group.carrier is not None and group.carrier.by_caller
        ahead = prefetch + (CARRIED if by_caller else 0)
        maker = BatchFactory(
            program, self._orders, stage_of, self._meter, block, crew, _adapters.together(bound_sources),
            course, aligned if pinning is None else Arena(pinning).fresh,
        )  # fmt: skip
        overdue = OverdueCalls(timeout if group is None else group.timeout, schedule.file)
        if crew is not None:
            overdue.in_worker, overdue.ask_worker = crew.call_in, crew.ask_stack
        among = group if apart and any(flow.moved for flow in program.flows) else None
        record, exchange = batch_record(program, course, among), None
        if among is not None:
            room, keep = slots(prefetch, self.on_devices, by_caller=by_caller), KEEP + self.on_devices
            exchange = form(
                among, maker, order, slots=room, keep=keep,
                calls=replace(overdue),  # separate state, for other threads
                recording=Recording(record), doing=record.doing if record is not None else lambda _: "",
                pinning=pinning,
            )  # fmt: skip
            if crew is not None:
                crew.share(exchange.slots, exchange.made_slots)
        self._exchange, self._prefetch, self._by_caller = exchange, prefetch, by_caller
        self._checks = Checks(program, self._orders, steps, course.step, self._meter)
        self._cursor, self._is_armed = _Cursor(maker.batch, course, self._armed), False
        name = f"commplan-{schedule.plan}-{phase}"
        direct = _direct(program, exchange)
        self._ring = Prefetcher(
            self._cursor.start, ahead, cores, name, exchange, crew, direct, overdue, record
        )
        if record is not None:
            record.watch(_overdue_call(self._ring, overdue), _awaited(exchange))
        self._closing = weakref.finalize(self, _end, self._ring, self._formed, pinning, self._process)

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The meters of this phase; they stay valid after `close`."""
        return (self._meter,)

    def _await_due(self) -> HostBatch:
        self._arm()
        number, step = self._front - self._first, self._front % self._steps
        if self._due is None or self._due.number != number:
            self._ring.pass_on(number)
            self._carry_ahead(step)
            self._due, ready, waited = self._ring.look(number)
            self._meter.handed_out(ready, waited, first=step == 0)
        if self._exchange is not None:
            self._exchange.handed(self._due.number)
        return self._due

    def _pass_on(self, place: int) -> None:
        self._ring.pass_on(place - self._first)

    def _is_ready(self, place: int) -> bool:
        """Whether the batch is ready. If the caller's thread carries batches, all processes must form equally
        many, ready or not."""
        return self._by_caller or self._ring.ready(place - self._first)

    def _arm(self) -> None:
        if self._armed > self._cursor.until or not self._is_armed:
            self._cursor.until, self._is_armed = self._armed, True
            if self._exchange is not None and self._closing.alive:
                self._exchange.arm(self._armed + 1)

    def _carry_ahead(self, step: int) -> None:
        """Carry batches between hosts in this thread: a number that depends on the position alone."""
        if self._by_caller and self._exchange is not None:
            self._ring.admit()
            left = self._steps - step  # in this epoch, including this batch
            self._exchange.carry_ahead(self._front - self._first + min(self._prefetch, left) - 1)

    @property
    def exchange(self) -> GroupExchange | None:
        """This process's side of the group; None if no values are shared."""
        return self._exchange

    def summary(self) -> Summary:
        """The cost of the input so far, per plan line, in this process."""
        ready, depth = self._ring.depth_now()
        exchange = self._exchange if self._closing.alive else None
        slots, used = exchange.in_use() if exchange is not None else (0, 0)
        return self._meter.summary(Queue(ready=ready, depth=depth, slots=slots, used=used))

    def close(self) -> None:
        """Stop the work ahead, join its threads and leave the group. May be called twice."""
        if self._closing.detach() is not None:
            self._due = None
            _drop(self._formed, self.pinning)
            self._ring.close()


def _drop(formed: dict[int, Any], pinning: Pinning | None) -> None:
    """Release items formed ahead, after devices have finished copying from host memory."""
    if pinning is not None:
        pinning.end(formed.values())
    formed.clear()


def _end(ring: Prefetcher, formed: dict[int, Any], pinning: Pinning | None, process: int) -> None:
    if os.getpid() == process:  # a forked process has separate copies
        _drop(formed, pinning)
    ring.end()


def _overdue_call(ring: Prefetcher, calls: OverdueCalls) -> Callable[[], Call | None]:
    """A function that returns the oldest call of user code in the threads of `ring`, without keeping `ring`
    alive."""
    ring_of = weakref.ref(ring)
    own = OverdueCalls(calls.bound_s, calls.file, calls.in_worker)

    def call() -> Call | None:
        ring = ring_of()
        return None if ring is None else own.oldest(ring.makers())

    return call


def _awaited(exchange: GroupExchange | None) -> Callable[[], int]:
    exchange_of = None if exchange is None else weakref.ref(exchange)

    def awaited() -> int:
        exchange = exchange_of and exchange_of()
        return -1 if exchange is None else exchange.awaited

    return awaited


def _direct(program: HostProgram, exchange: GroupExchange | None) -> bool:
    """Whether the caller takes batches directly from the slots: this process runs no stages after the shared
    part, and no thread of it carries batches between hosts."""
    if exchange is None or any(flow.after or not flow.moved for flow in program.flows):
        return False
    return not exchange.leads() or (exchange.carrier is not None and exchange.carrier.by_caller)
