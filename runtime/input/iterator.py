"""Iterator over the batches of one phase, in an order that only the plan determines."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from commplan.input.prefetch import CARRIED, KEEP, device_prefetch, slots
from commplan.ir.schedule import Schedule
from commplan.runtime.input.epoch_iterator import EpochIterator
from commplan.runtime.input.group import Group
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.layout import aligned
from commplan.runtime.input.observe.accounting import Meter, Queue, Summary
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.recorded_run import batch_record
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.observe.wait_log import PATIENCE_S
from commplan.runtime.input.phase_order import (
    block_of,
    epoch_steps,
    fingerprint,
    hints,
    load_orders,
    ops_of,
    position_of,
)
from commplan.runtime.input.program import EpochCursor, host_program
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.ring.forming import form
from commplan.runtime.input.ring.producers import Recording
from commplan.runtime.input.shm.slots import give_back_freed
from commplan.runtime.input.sources import files as _sources
from commplan.runtime.input.stages.batch_inputs import BatchInputs
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions, workers_of
from commplan.runtime.input.unit_batches import UnitBatches, are_units
from commplan.runtime.input.window import BatchWindow

if TYPE_CHECKING:
    from commplan.recorder.file import Call
    from commplan.runtime.machines.pinned import Pinning


class PhaseBatches(EpochIterator):
    """Batches of one phase, one epoch per `iter()`.

    `for batch in batches` runs to the end of the current epoch; the next `for` runs the next epoch. Threads
    work ahead: `prefetch` batches and `cores` threads, from the braces of loads and maps; by default 2
    batches and one thread per CPU up to 8. They end with `close`, with a `with` block, when the object is
    collected, and at interpreter exit. Waiting uses no CPU. Several threads may call `next`: each batch goes
    to one of them.

    Attributes: see `EpochIterator`. `on_devices` is the plan's `device_prefetch`.

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
        workers: "threads", or "processes" for functions that hold the interpreter lock (CP0955 otherwise).
        timeout: seconds that one call of a source or a host function may take. With a `group`, its timeout
            applies instead.
        pinning: registers the memory of batches with the devices that they are copied to. Unused if the plan
            copies no batches to devices ahead of the caller (`device_prefetch`).

    Raises:
        CommplanError: CP0817 for an unknown phase, CP0761 for an invalid division among processes, else
            CP09xx. Errors of sources, functions, state and designs are raised here; errors of a record or a
            peer are raised by the `next` that would have returned its batch.
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

        # The host program, its order of records, and the position of the first batch.
        apart = group is not None and group.count > 1
        program = host_program(schedule, phase, local, apart=apart)
        source_names = [read.source for flow in program.flows for read in flow.reads]
        bound_sources = _sources.bind_sources(schedule, sources, source_names)
        called = called_functions(program, functions)
        self._orders = load_orders(program, bound_sources)
        self._program = program
        steps, order = epoch_steps(program, self._orders), fingerprint(program, self._orders)
        epoch_cursor = EpochCursor(*position_of(program, self._orders, state, steps, order), steps)
        self._start(epoch_cursor.epoch, epoch_cursor.step, steps, order)

        # The inputs of the batches: threads or worker processes, and memory.
        self._meter = Meter(phase, schedule.plan)
        declared(program, self._meter)
        prefetch, cores = hints(program)
        block = block_of(program, cores)
        self.on_devices = device_prefetch(ops_of(program))
        self.pinning = pinning = pinning if self.on_devices else None
        worker_pool = workers_of(workers, cores, program, bound_sources, called, block, self._meter, pinning)
        by_caller = group is not None and group.carrier is not None and group.carrier.by_caller
        ahead = prefetch + (CARRIED if by_caller else 0)
        memory = aligned
        if pinning is not None:
            from commplan.runtime.input.shm.arena import Arena  # noqa: PLC0415  few processes have devices

            memory = Arena(pinning).fresh
        inputs = BatchInputs(
            program, self._orders, bound_sources, called, self._meter, block, worker_pool, epoch_cursor,
            memory,
        )  # fmt: skip
        among = group if apart and any(flow.moved for flow in program.flows) else None
        if among is None or program.has_caches or not are_units(program):
            _ = inputs.factory  # needed in any case: its errors are raised here

        # The window of batches between the ring and the caller.
        self._calls = OverdueCalls(timeout if group is None else group.timeout, schedule.file)
        if worker_pool is not None:
            self._calls.in_worker, self._calls.ask_worker = worker_pool.call_in, worker_pool.ask_stack
        self._record = record = batch_record(program, epoch_cursor, among)
        name = f"commplan-{schedule.plan}-{phase}"
        self._window = window = BatchWindow(inputs, cores, name, worker_pool, self._calls, record)
        if any(flow.moved for flow in program.flows):
            self._open_ring(among, inputs, order, slots(prefetch, self.on_devices, by_caller=by_caller))

        # The state of the iteration.
        self._is_shared = among is not None  # whether processes share the batches
        self._ahead = ahead  # the most batches that wait for the caller
        self._by_caller = by_caller  # whether the caller's thread moves batches between hosts
        self._prefetch = prefetch
        self._until = 0  # batches before this number have been requested
        self._checks = Checks(program, self._orders, steps, epoch_cursor.step, self._meter)
        if record is not None:
            record.watch(_overdue_call(window, self._calls), _awaited_batch(window.exchange))
        if among is not None:
            give_back_freed()
        self._closing = weakref.finalize(self, _end, window, self._formed, pinning, self._process)

    def _open_ring(self, among: Group | None, inputs: BatchInputs, order: int, slot_count: int) -> None:
        """Connect the window with a ring.

        Args:
            among: the processes that share the ring; None for this process alone.
            inputs: the inputs of the batches.
            order: the checksum of the order of records.
            slot_count: the number of slots.
        """
        program, window, record = self._program, self._window, self._record
        group = among or Group(f"{program.schedule.plan}-{self._phase}", 0, 1, self._calls.bound_s, (0,))
        exchange = window.exchange = form(
            group, inputs, order, slots=slot_count, keep=KEEP + self.on_devices,
            calls=replace(self._calls),  # separate state, for other threads
            recording=Recording(record), doing=record.doing if record is not None else lambda _: "",
            pinning=self.pinning,
        )  # fmt: skip
        if are_units(program):
            layout, steps = exchange.units.layout, inputs.epoch_cursor.steps
            units = UnitBatches(program, self._orders, layout, steps, inputs.memory)
            if units.are_views and exchange.carrier is None:
                window.unit_batches, units.receipts.key = units, exchange.key
                self._meter.counters += [units.receipts.costs] if among is not None else []
        if inputs.workers is not None:
            inputs.workers.share(exchange.slots, exchange.made_slots)

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The meters of this phase; they stay valid after `close`."""
        return (self._meter,)

    def _prepare(self, position: int) -> None:
        super()._prepare(position)
        self._checked_until = (self._epoch_begun + 1) * self._steps

    def _await_due(self, position: int) -> HostBatch:
        number, step, batch = position - self._first, position % self._steps, self._due
        if number >= self._until:
            self._arm(number)
        if batch is None or batch.number != number:
            remaining = self._steps - step  # batches of this epoch, including this one
            batch, ready, waited = self._window.take(number, min(self._prefetch, remaining))
            self._due = batch
            self._meter.count_batch(min(ready, self._ahead), waited, first=step == 0)
        self._checks.add(batch)
        return batch

    def _arm(self, number: int) -> None:
        """Request all batches of the epoch if processes share them, else `prefetch` from `number` on."""
        end = (self._epoch_begun + 1) * self._steps - self._first
        limit = end if self._is_shared else min(number + self._prefetch, end)
        if limit > self._until and self._window.exchange is not None and self._closing.alive:
            self._window.arm(limit)
            self._until = limit

    def _release_before(self, position: int) -> None:
        number, end = position - self._first, (self._epoch_begun + 1) * self._steps - self._first
        if not self._is_shared:
            self._arm(number)
        self._window.pass_on(number, min(number + self._prefetch, end))

    def _is_ready(self, position: int) -> bool:
        """Whether the batch is ready, or the caller's thread moves batches between hosts.

        In the second case, all processes must form equally many batches ahead, ready or not.
        """
        return self._by_caller or self._window.ready(position - self._first) > 0

    @property
    def exchange(self) -> GroupExchange | None:
        """This process's side of the group; None if no values are shared."""
        return self._window.exchange if self._is_shared else None

    def summary(self) -> Summary:
        """The cost of the input so far, per plan line, in this process."""
        ready = min(self._window.ready(self._front - self._first), self._ahead)
        exchange = self.exchange if self._closing.alive else None
        slots, used = exchange.in_use() if exchange is not None else (0, 0)
        return self._meter.summary(Queue(ready=ready, depth=self._ahead, slots=slots, used=used))

    def close(self) -> None:
        """Stop the work ahead, join its threads and leave the group. May be called twice."""
        if self._closing.detach() is not None:
            self._due, self._checked_until = None, 0
            _drop(self._formed, self.pinning)
            self._window.close()


def _drop(formed: dict[int, Any], pinning: Pinning | None) -> None:
    """Release items formed ahead, after devices have finished copying from host memory."""
    if pinning is not None:
        pinning.end(formed.values())
    formed.clear()


def _end(window: BatchWindow, formed: dict[int, Any], pinning: Pinning | None, process: int) -> None:
    """Finalize an iterator that was made in `process` (a PID) and not closed."""
    if os.getpid() == process:  # a forked process has separate copies
        _drop(formed, pinning)
    window.end()


def _overdue_call(window: BatchWindow, calls: OverdueCalls) -> Callable[[], Call | None]:
    """A function that returns the oldest call of user code in the threads of `window`, without keeping
    `window` alive."""
    reference = weakref.ref(window)
    overdue_calls = OverdueCalls(calls.bound_s, calls.file, calls.in_worker)

    def call() -> Call | None:
        window = reference()
        return None if window is None else overdue_calls.oldest(window.callers_of_user_code())

    return call


def _awaited_batch(exchange: GroupExchange | None) -> Callable[[], int]:
    """A function that returns the process that blocks a long wait, or -1. Holds only a weak reference."""
    exchange_of = None if exchange is None else weakref.ref(exchange)

    def awaited() -> int:
        exchange = exchange_of and exchange_of()
        return -1 if exchange is None else exchange.awaited

    return awaited
