"""The batches of a phase between its ring and the caller, with the stages that each process runs itself.

`PhaseBatches` takes its batches from a `BatchWindow`, which waits for their units and runs the remaining
stages ahead of the caller.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from commplan.diagnostics import CommplanError
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.stages.batch_inputs import BatchInputs
from commplan.wait import join_within, result_of, until_done

if TYPE_CHECKING:
    from concurrent.futures import Future

    from commplan.runtime.input.observe.batch_record import BatchRecord
    from commplan.runtime.input.ring.exchange import GroupExchange
    from commplan.runtime.input.stages.batch_builder import BatchBuilder, Task
    from commplan.runtime.input.stages.stage_threads import StageThreads
    from commplan.runtime.input.stages.worker_pool import Workers
    from commplan.runtime.input.unit_batches import UnitBatches

_END_S = 1.0  # seconds that `close` waits for threads to end after an interruption


@dataclass
class _Entry:
    """A batch that the caller has not passed yet. Batches that are one unit need no entry.

    Attributes:
        builder: builds the batch.
        tasks: the stages that this process runs itself; None before the unit of the batch is made.
        begun: the first of `tasks`, which stage threads run or have run.
        batch: the finished batch; None before.
    """

    builder: BatchBuilder
    tasks: Sequence[Task] | None = None
    begun: list[Future[None]] = field(default_factory=list["Future[None]"])
    batch: HostBatch | None = None


@dataclass
class BatchWindow:
    """The batches that the caller has not passed yet.

    Attributes:
        inputs: the inputs of the batches.
        threads: the number of threads for stages that each process runs itself.
        name: the prefix of the threads' names.
        workers: the worker processes that make batches; None if threads make them.
        calls: detects user functions that do not return.
        record: the record of this process's run; None if the run is not recorded.
        exchange: waits for the units; None if the phase has no value that can be stored in a slot.
        unit_batches: makes batches that are views of one unit; None if batches of this phase are not.
    """

    inputs: BatchInputs
    threads: int
    name: str
    workers: Workers | None
    calls: OverdueCalls
    record: BatchRecord | None
    exchange: GroupExchange | None = None
    unit_batches: UnitBatches | None = None
    _entries: dict[int, _Entry] = field(default_factory=dict[int, _Entry])
    _stage_threads: StageThreads | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a finalizer may acquire it again
    _callers: set[int] = field(default_factory=set[int])  # identifiers of threads that use the slots
    _is_closed: bool = False
    _has_departed: bool = False
    _process: int = field(default_factory=os.getpid)
    _is_interrupted: bool = False  # a wait for a batch was interrupted, so its construction may hang

    def take(self, number: int, ahead: int) -> tuple[HostBatch, int, float]:
        """Wait for batch `number`. An interrupted caller can call again.

        Args:
            number: the number of the batch.
            ahead: the number of batches to move between hosts, if the caller's thread does this.

        Returns:
            The batch, the number of consecutive batches from `number` on that were ready before the wait, and
            the seconds waited.

        Raises:
            ClosedError: if the window is closed.
            Exception: the error of the batch.
        """
        caller, record, failure = self._enter(), self.record, None
        operation = 0 if record is None else record.begin("wait", number)
        try:
            return self._take(number, ahead)
        except ClosedError:
            raise
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise
        except Exception as error:
            is_overdue = isinstance(error, CommplanError) and error.diagnostics[0].code == "CP0926"
            self._is_interrupted |= is_overdue  # an overdue call does not return, either
            failure = error
            raise
        finally:
            if record is not None:
                record.end(operation, failure)
            self._exit(caller)

    def _enter(self) -> int:
        """Keep the slots mapped until `_exit` is called with the result, the identifier of this thread.

        Raises:
            ClosedError: if the window is closed.
        """
        caller = threading.get_ident()
        # No lock: `abandon` sets `_is_closed` before it reads `_callers`.
        self._callers.add(caller)
        if self._is_closed:
            self._exit(caller)
            raise ClosedError
        return caller

    def _exit(self, caller: int) -> None:
        """End the use of the slots by `caller`. The last caller of a closed window leaves the group."""
        self._callers.discard(caller)
        if self._is_closed and not self._callers:
            self._depart()

    def _take(self, number: int, ahead: int) -> tuple[HostBatch, int, float]:
        """As `take`, without a record."""
        begun, ready = time.perf_counter(), 0
        exchange, units = self.exchange, self.unit_batches
        if exchange is not None:
            ready = exchange.ring.made_from(number)
            if exchange.carrier is not None:
                exchange.carry_ahead(number + ahead - 1)
            if units is not None:  # few calls: the CPU caches are cold after a training step
                try:
                    root, parts = exchange.take(number)
                finally:
                    units.receipts.waited_s += time.perf_counter() - begun
                if root is not None:
                    batch = units.batch(root, *self.inputs.epoch_cursor.at(number), number, parts)
                    return batch, ready, time.perf_counter() - begun
        entry = self._begin(number)
        for task in entry.begun:
            result_of(task, lambda waited: self.calls.look(self.callers_of_user_code()))
        if entry.batch is None:
            entry.batch = entry.builder.finish()
        if exchange is not None:
            exchange.recall_older(number)
        return entry.batch, ready, time.perf_counter() - begun

    @functools.cached_property
    def _uses_stage_threads(self) -> bool:
        """Whether this process runs stages itself, after those that fill the slots."""
        return self.exchange is not None and any(flow.after for flow in self.inputs.program.flows)

    def _begin(self, number: int) -> _Entry:
        """Wait for the unit of batch `number` and begin the stages that this process runs itself.

        Without stage threads, all stages run now, in the calling thread.
        """
        entry, exchange = self._entries.get(number), self.exchange
        if entry is None:
            entry = self._entries[number] = _Entry(self.inputs.factory.batch(number))
        if entry.tasks is None:
            if exchange is not None:
                exchange.readable(number)
                arrays, parts = exchange.lend(number)
                entry.builder.receive(arrays, parts, exchange.units.layout.divisions)
            entry.tasks = entry.builder.second()
        if entry.batch is not None:
            return entry
        if not self._uses_stage_threads:
            for task in entry.tasks:
                task()
            return entry
        if self._stage_threads is None:
            from commplan.runtime.input.stages.stage_threads import StageThreads  # noqa: PLC0415  few need any

            self._stage_threads = StageThreads(self.threads, f"{self.name}-own")
        while len(entry.begun) < len(entry.tasks):  # continues after an interruption
            entry.begun.append(self._stage_threads.submit(entry.tasks[len(entry.begun)]))
        return entry

    def arm(self, end: int) -> None:
        """Request all batches before number `end`. Does nothing if the window is closed."""
        with contextlib.suppress(ClosedError):  # `take` raises it
            caller = self._enter()
            try:
                if self.exchange is not None:
                    self.exchange.arm(end)
            finally:
                self._exit(caller)

    def pass_on(self, number: int, end: int) -> None:
        """Drop all batches before `number`, and begin the stages of made batches in [number, end)."""
        for old in tuple(self._entries):
            if old < number:
                self._entries.pop(old, None)  # another thread may close the batches
        if self.exchange is None:
            return
        self.exchange.pass_on(number)
        if not self._uses_stage_threads:
            return
        with contextlib.suppress(Exception):  # raised again when the caller reaches the batch
            caller = self._enter()
            try:
                while number < end and self.exchange.ring.is_made(number):
                    self._begin(number)
                    number += 1
            finally:
                self._exit(caller)

    def ready(self, number: int) -> int:
        """The number of consecutive batches from `number` on that are made."""
        return 0 if self.exchange is None or self._is_closed else self.exchange.ahead(number)

    def callers_of_user_code(self) -> list[threading.Thread]:
        """The threads that call user code: those that make batches, and the main thread."""
        makers = [] if self.exchange is None else self.exchange.producers.running
        stage_threads = [] if self._stage_threads is None else self._stage_threads.running
        return [*stage_threads, *makers, threading.main_thread()]

    # --- the end ---

    def close(self) -> None:
        """Stop, join every thread and leave the group. May be called twice, and from any thread.

        After an interruption, threads that are still busy after a second are not joined: the interrupted call
        may hang.
        """
        if os.getpid() != self._process:
            return
        self.abandon()
        deadline = time.monotonic() + _END_S
        finished = {threading.main_thread(), threading.current_thread()}
        while threads := [thread for thread in self.callers_of_user_code() if thread not in finished]:
            for thread in threads:  # the first of them may have started another
                finished.add(thread)
                if thread.ident is not None:
                    until_done(
                        lambda seconds, thread=thread: (
                            join_within(thread, seconds)
                            or (self._is_interrupted and time.monotonic() > deadline)
                        )
                    )
        if self.exchange is not None:
            self.exchange.producers.detach()
            made_slots = self.exchange.made_slots
            if not made_slots.is_private:  # `leave` closes private slots, which callers use, too
                made_slots.close()  # a thread that still makes a part keeps the slot of that part

    def abandon(self) -> None:
        """Stop without waiting: threads end after their current record, and the last one leaves the group.

        Finalizers call this at any point of any thread. In a forked process this does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
            is_last = not self._callers - {threading.get_ident()}
        if self.workers is not None:
            self.workers.stop()
        if self.exchange is not None:
            self.exchange.stop()
        if self._stage_threads is not None:
            self._stage_threads.close()
        if is_last:
            self._depart()

    def end(self) -> None:
        """Stop, from a finalizer.

        Threads are joined only at interpreter exit, when no running code can hold a lock that they need.
        """
        if threading.main_thread().is_alive():
            self.abandon()
        else:
            self.close()

    def _depart(self) -> None:
        """Leave the group and close the worker processes, once."""
        with self._lock:
            if self._has_departed:
                return
            self._has_departed = True
        self._entries.clear()
        try:
            if self.exchange is not None:
                self.exchange.leave()
            elif self.record is not None:
                self.record.close()
        finally:
            if self.workers is not None:
                self.workers.close()
