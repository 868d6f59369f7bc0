"""Work ahead: a bounded ring of batches under construction, filled by threads and returned in order.

A batch is opened, made in independent tasks, and finished. If processes share a value, opening waits for the
shared part of the batch, in a separate thread. If no other work remains for a batch, the ring is direct: the
caller takes the shared part, and no batch passes between threads. Threads hold a reference to the ring but
not to the iterator in front of it: an abandoned iterator is collected, and that closes the ring.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from commplan.diagnostics import CommplanError
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.observe.batch_record import BatchRecord
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.stages.batch_builder import BatchBuilder, Task
from commplan.wait import attended, ended

if TYPE_CHECKING:
    from commplan.runtime.input.ring.exchange import GroupExchange
    from commplan.runtime.input.stages.worker_pool import Workers

PATIENCE = 1.0  # seconds for threads to end after an interruption
_Result = TypeVar("_Result")


@dataclass
class _Entry:
    making: BatchBuilder
    todo: int = 0
    operation: int = 0  # in the record, while its tasks run
    error: BaseException | None = None
    error_at: int = 0
    done: bool = False
    item: HostBatch | None = None


@dataclass
class Prefetcher:
    """Builds batches ahead of the caller.

    Attributes:
        start: makes batch `number`, counted from 0; None if work is suspended. `admit` and `look` try again.
        depth: the number of batches admitted and not yet passed on, at most.
        threads: the number of threads.
        name: a prefix for names of threads.
        peers: the shared part of batches; None in one process.
        workers: processes that do the work of the threads; None if the threads do it.
        direct: the caller takes batches from the slots (see above).
        calls: detects calls of user code that do not return.
        record: records the events of batches.
    """

    start: Callable[[int], BatchBuilder | None]
    depth: int
    threads: int
    name: str
    peers: GroupExchange | None = None
    workers: Workers | None = None
    direct: bool = False
    calls: OverdueCalls | None = None
    record: BatchRecord | None = None
    # Entered as the lock and waited on as the condition: `Condition.__enter__` is a Python function, and
    # Ctrl-C in it could leave the lock acquired for good.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)
    _entries: dict[int, _Entry] = field(default_factory=dict[int, _Entry])
    _tasks: list[tuple[int, int, int, Task]] = field(default_factory=list[tuple[int, int, int, Task]])
    _ties: itertools.count[int] = field(default_factory=itertools.count)
    _running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _begun: bool = False  # all threads are started
    _alive: int = 0  # threads, and callers that wait for peers
    _admitted: int = 0
    _opened: int = 0
    _opening: bool = False
    _handed: int = 0
    _failed: tuple[int, BaseException] | None = None  # the first batch that cannot be made, and its error
    _closed: bool = False
    _process: int = field(default_factory=os.getpid)
    _interrupted: bool = False  # during a wait for a batch, whose construction may hang

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    # --- the caller's side ---

    def admit(self) -> None:
        """Start batches until `depth` of them are in progress."""
        with self._lock:
            if self._closed:
                return
            self._begin_threads()
            while self._admitted < self._handed + self.depth:
                making = self.start(self._admitted)
                if making is None:
                    break  # threads still need the notification for earlier batches
                self._entries[self._admitted] = _Entry(making)
                self._admitted += 1
            self._changed.notify_all()

    def look(self, number: int | None = None) -> tuple[HostBatch, int, float]:
        """Wait for a batch, which stays until `pass_on`: an interrupted caller can call again.

        Args:
            number: the batch; None for the next one.

        Returns:
            The batch, the number of ready batches, and the seconds waited.

        Raises:
            Exception: the error of the batch.
        """
        number = self._handed if number is None else number
        try:
            return self._take(number) if self.record is None else self._recorded(self.record, number)
        except (KeyboardInterrupt, CommplanError) as error:  # an overdue call does not return either
            is_overdue = isinstance(error, CommplanError) and error.diagnostics[0].code == "CP0926"
            self._interrupted |= is_overdue or isinstance(error, KeyboardInterrupt)
            raise

    def _recorded(self, record: BatchRecord, number: int) -> tuple[HostBatch, int, float]:
        operation, failure = record.begin("wait", number), None
        try:
            return self._take(number)
        except ClosedError:
            raise
        except Exception as error:
            failure = error
            raise
        finally:
            record.end(operation, failure)

    def _take(self, number: int) -> tuple[HostBatch, int, float]:
        if number >= self._admitted:  # otherwise `pass_on` has already admitted as many as `depth` permits
            self.admit()
        begin = time.perf_counter()
        with self._lock:
            ready, _ = self.depth_now()
            entry = self._entries.get(number)
            if self._closed or entry is None:
                raise ClosedError
            if not self.direct:
                self._await(lambda: self._is_over(number, entry), self._check_threads)
            self._alive += self.direct
        try:
            if self.direct and entry.item is None:
                for task in self._tasks_of(number, entry):
                    task()
                entry.item = entry.making.finish()
        finally:
            if self.direct:
                self._ended()
        if entry.error is not None:
            raise entry.error
        if entry.item is None:
            raise RuntimeError("a batch was finished without a result")
        return entry.item, ready, time.perf_counter() - begin

    def _is_over(self, number: int, entry: _Entry) -> bool:
        if not entry.done and self._failed is not None and number >= self._failed[0]:
            raise self._failed[1]
        return entry.done

    def _check_threads(self, waited: float) -> None:
        """Check that all threads are alive: without an error, none ends before the ring is closed."""
        gone = next((thread for thread in self._running if thread.ident and not thread.is_alive()), None)
        if gone is not None:
            raise RuntimeError(f"thread {gone.name!r}, which makes batches, has ended; waited {waited:.1f} s")
        if self.calls is not None:
            self.calls.look(self._running)

    def makers(self) -> list[threading.Thread]:
        """The threads that call user code: those that make batches, and the main thread."""
        peers = self.peers
        shared = [] if peers is None else peers.producers.running
        return [*self._running, *shared, threading.main_thread()]

    def pass_on(self, number: int) -> None:
        """Release all batches before `number` and start as many new ones as `depth` permits."""
        with self._lock:
            if number <= self._handed:
                return
            before, self._handed = self._handed, number
            for old in range(before, number):
                self._entries.pop(old, None)
        self.admit()

    def depth_now(self) -> tuple[int, int]:
        """The number of ready batches, and the number that may be made ahead at most."""
        with self._lock:
            ready = sum(entry.done for entry in self._entries.values())
            if self.direct and self.peers is not None and not self._closed:
                ready = min(self.peers.ahead(self._handed), self.depth)
            return ready, self.depth

    def ready(self, number: int) -> bool:
        """Whether `look` would return batch `number` without waiting."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is None or self._closed:
                return False
            return self.peers.ahead(number) > 0 if self.direct and self.peers is not None else entry.done

    def close(self) -> None:
        """Stop, join every thread and leave the peers. May be called twice, and from any thread.

        After an interruption, threads that are still busy after a second are not joined: the interrupted call
        may hang.
        """
        if os.getpid() != self._process:
            return
        peers = self.peers
        running = [*self._running, *([] if peers is None else peers.producers.running)]
        self.abandon()
        deadline = time.monotonic() + PATIENCE

        def over(thread: threading.Thread, seconds: float) -> bool:
            return ended(thread, seconds) or (self._interrupted and time.monotonic() > deadline)

        for thread in running:
            if thread is threading.current_thread() or thread.ident is None:  # interrupted before its start
                continue
            attended(functools.partial(over, thread))
        if peers is not None:
            peers.producers.detach()

    def abandon(self) -> None:
        """Stop without waiting: threads end after their current record, and the last one leaves the peers.

        Finalizers call this at any point of any thread. A join there could wait for a lock that the
        interrupted code holds. In a forked process this does nothing: threads, peers and workers belong to
        the parent.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._running = []
            self._changed.notify_all()
            alone = self._alive == 0
        if self.workers is not None:
            self.workers.stop()
        if self.peers is not None:
            self.peers.stop()
        if alone:
            self._depart()

    def end(self) -> None:
        """Stop, from a finalizer. Joins threads only at interpreter exit, when no running code can hold a
        lock that they need."""
        if threading.main_thread().is_alive():
            self.abandon()
        else:
            self.close()

    def _depart(self) -> None:
        with self._lock:
            self._entries.clear()
            peers, self.peers = self.peers, None
        if self.record is not None and peers is None:
            self.record.close()
        if self.workers is not None:
            self.workers.close()
        if peers is not None:
            peers.leave()

    # --- the threads ---

    def _begin_threads(self) -> None:
        if self._begun:
            return
        if not self._running:
            threads = self._fresh_threads()
            self._alive, self._running = self._alive + len(threads), threads
        for thread in self._running:
            if thread.ident is None:
                thread.start()
        self._begun = bool(self._running)

    def _fresh_threads(self) -> list[threading.Thread]:
        finders = [] if self.direct else [self._next_job] * self.threads
        if self.peers is not None and not self.direct:
            finders.append(self._next_opening)
        # Daemons, so that an abandoned iterator cannot keep the interpreter alive; `close` joins them, which
        # a finalizer calls at interpreter exit at the latest.
        return [
            threading.Thread(target=self._run, args=(find,), name=f"{self.name}-{number}", daemon=True)
            for number, find in enumerate(finders)
        ]

    def _run(self, find: Callable[[], Task | None]) -> None:
        try:
            while True:
                with self._lock:
                    job = find() if self._tasks and not self._closed else None
                    job = job or self._await(find)  # usually there is one already
                job()
        except ClosedError:
            pass
        finally:
            if self.workers is not None:
                self.workers.leave()
            self._ended()

    def _await(
        self, find: Callable[[], _Result | None], look: Callable[[float], object] = lambda waited: None
    ) -> _Result:
        """Wait until `find` returns a result. Releases the lock while waiting."""

        def attempt(seconds: float) -> _Result | None:
            if self._closed:
                raise ClosedError
            job = find()
            if not job:
                self._changed.wait(seconds)
            return job

        return attended(attempt, look)

    def _ended(self) -> None:
        with self._lock:
            self._alive -= 1
            last = self._closed and self._alive == 0
        if last:
            self._depart()

    # --- work of the threads: the lock is held while a finder runs ---

    def _next_job(self) -> Task | None:
        if self._tasks:
            number, key, _, task = heapq.heappop(self._tasks)
            return functools.partial(self._carry_out, number, key, task)
        return self._next_opening() if self.peers is None else None

    def _next_opening(self) -> Task | None:
        if self._opening or self._opened == self._admitted:
            return None
        number, self._opened, self._opening = self._opened, self._opened + 1, True
        return functools.partial(self._open, number)

    def _open(self, number: int) -> None:
        """Begin batch `number`. If that fails, no later one is opened."""
        entry, tasks = self._entries.get(number), ()
        try:
            if entry is not None:  # otherwise the caller has already passed it on
                tasks = self._tasks_of(number, entry)
        except ClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  raised in the caller
            self._fail(number, error)
            return
        with self._lock:
            self._opening = False
        if entry is not None:
            self._enter(number, entry, tasks)

    def _tasks_of(self, number: int, entry: _Entry) -> Sequence[Task]:
        """The tasks of a batch. Waits for its shared part."""
        peers = self.peers
        if peers is not None:
            peers.readable(number)
            entry.making.receive(*peers.lend(number), peers.units.layout.divisions)
        elif self.direct:
            raise ClosedError
        return entry.making.second()

    def _enter(self, number: int, entry: _Entry, tasks: Sequence[Task]) -> None:
        """Queue the tasks of a batch."""
        if self.record is not None and tasks:
            entry.operation = self.record.begin("make", number)
        with self._lock:
            entry.todo = len(tasks)
            for key, task in enumerate(tasks):
                heapq.heappush(self._tasks, (number, key, next(self._ties), task))
            self._changed.notify_all()
        if not tasks:
            self._finish(entry)

    def _carry_out(self, number: int, key: int, task: Task) -> None:
        entry = self._entries.get(number)
        if entry is None:
            return
        error: BaseException | None = None
        try:
            # A failed batch needs no more work; only the error of an earlier record is still of interest.
            if entry.error is None or key < entry.error_at:
                task()
        except BaseException as raised:  # noqa: BLE001  raised in the caller, at this batch
            error = raised
        with self._lock:
            if error is not None and (entry.error is None or key < entry.error_at):
                entry.error, entry.error_at = error, key
            entry.todo -= 1
            if entry.todo:
                return
        self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        try:
            if entry.error is None:
                entry.item = entry.making.finish()
        except BaseException as raised:  # noqa: BLE001  raised in the caller
            entry.error = raised
        if self.record is not None and entry.operation:
            self.record.end(entry.operation, entry.error)
            entry.operation = 0
        with self._lock:
            entry.done = True
            self._changed.notify_all()

    def _fail(self, number: int, error: BaseException) -> None:
        """Record that batches from `number` on cannot be made."""
        with self._lock:
            if self._failed is None or number < self._failed[0]:
                self._failed = number, error
            self._changed.notify_all()
