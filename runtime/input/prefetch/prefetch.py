"""Work ahead: a bounded ring of batches in the making, filled by threads, handed out in order.

A batch is opened, made in independent tasks, and finished. If processes share a value, opening waits for the
shared part of the batch, in a thread of its own. If nothing is left to do for a batch then, the ring is
direct: the caller takes the shared part, and no batch is passed from thread to thread. Threads hold the ring
and never the iterator in front of it: a forgotten iterator is collected, and that closes the ring.
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

PATIENCE = 1.0  # seconds for threads to end in after an interruption
_Result = TypeVar("_Result")


@dataclass
class _Entry:
    making: BatchBuilder
    todo: int = 0
    operation: int = 0  # in the record, while its tasks are carried out
    error: BaseException | None = None
    error_at: int = 0
    done: bool = False
    item: HostBatch | None = None


@dataclass
class Prefetcher:
    """start: makes batch `number`, counted from 0, or None where the work halts for now: `admit` and `look`
    ask again.

    depth: batches admitted and not yet handed out, at most. threads: how many work. peers: None in one
    process. workers: what the threads leave their work to; None: they do it. direct: see above. calls: those
    of the user's code that do not return. record: what happens is written there.
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
    # Entered as the lock itself and waited on as the condition: a condition is entered by a Python function,
    # in which Ctrl-C may strike after the lock is taken and before anything will give it back.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)
    _entries: dict[int, _Entry] = field(default_factory=dict[int, _Entry])
    _tasks: list[tuple[int, int, int, Task]] = field(default_factory=list[tuple[int, int, int, Task]])
    _ties: itertools.count[int] = field(default_factory=itertools.count)
    _running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _begun: bool = False  # all of them are started
    _alive: int = 0  # threads, and callers that wait for peers
    _admitted: int = 0
    _opened: int = 0
    _opening: bool = False
    _handed: int = 0
    _failed: tuple[int, BaseException] | None = None  # the first batch that cannot be made, and why
    _closed: bool = False
    _process: int = field(default_factory=os.getpid)
    _interrupted: bool = False  # while a batch was waited for: its making may never end

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    # --- the caller's side ---

    def admit(self) -> None:
        """Start as many batches as there is room for."""
        with self._lock:
            if self._closed:
                return
            self._begin_threads()
            while self._admitted < self._handed + self.depth:
                making = self.start(self._admitted)
                if making is None:
                    break  # what was admitted so far is still to be told
                self._entries[self._admitted] = _Entry(making)
                self._admitted += 1
            self._changed.notify_all()

    def look(self, number: int | None = None) -> tuple[HostBatch, int, float]:
        """Batch `number` (None: the next one), how many lay ready, and the seconds waited. Raises what its
        making raised. The batch stays until `pass_on` says that it has come: a caller that was interrupted on
        the way asks again."""
        number = self._handed if number is None else number
        try:
            return self._take(number) if self.record is None else self._recorded(self.record, number)
        except (KeyboardInterrupt, CommplanError) as error:  # a call that is overdue will not return, either
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
        if number >= self._admitted:  # else as many as there is room for were admitted with the last
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
        """No thread ends before the ring is closed, unless something is wrong with it."""
        gone = next((thread for thread in self._running if thread.ident and not thread.is_alive()), None)
        if gone is not None:
            raise RuntimeError(f"thread {gone.name!r}, which makes batches, has ended; waited {waited:.1f} s")
        if self.calls is not None:
            self.calls.look(self._running)

    def makers(self) -> list[threading.Thread]:
        """The threads that call the user's code: those that make batches, and the program's."""
        peers = self.peers
        shared = [] if peers is None else peers.producers.running
        return [*self._running, *shared, threading.main_thread()]

    def pass_on(self, number: int) -> None:
        """All batches before `number` have come; what there is room for now is started."""
        with self._lock:
            if number <= self._handed:
                return
            before, self._handed = self._handed, number
            for old in range(before, number):
                self._entries.pop(old, None)
        self.admit()

    def depth_now(self) -> tuple[int, int]:
        """Batches that lie ready now, and how many may be made ahead at most."""
        with self._lock:
            ready = sum(entry.done for entry in self._entries.values())
            if self.direct and self.peers is not None and not self._closed:
                ready = min(self.peers.ahead(self._handed), self.depth)
            return ready, self.depth

    def ready(self, number: int) -> bool:
        """Whether `look` would return batch `number` at once."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is None or self._closed:
                return False
            return self.peers.ahead(number) > 0 if self.direct and self.peers is not None else entry.done

    def close(self) -> None:
        """Stop, join every thread and leave the peers. May be called twice, and from any thread.

        After an interruption, threads that are still busy a second later are left to end on their own: what
        was interrupted may hang.
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
        """Stop without waiting for anything: threads end when their record is done, the last one leaves
        the peers. For finalisers, which may run at any point of any thread: a join there could wait for
        what the interrupted code holds. In a process that was forked from this one's nothing is done: its
        threads, peers and workers are the parent's."""
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
        """What a finaliser calls: threads are joined at the interpreter's exit only, where nothing runs that
        could hold what they need."""
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
        # Daemons, so that a forgotten iterator cannot keep the interpreter alive; they are joined by
        # `close`, which a finaliser calls at the latest when the interpreter exits.
        return [
            threading.Thread(target=self._run, args=(find,), name=f"{self.name}-{number}", daemon=True)
            for number, find in enumerate(finders)
        ]

    def _run(self, find: Callable[[], Task | None]) -> None:
        try:
            while True:
                with self._lock:
                    job = find() if self._tasks and not self._closed else None
                    job = job or self._await(find)  # mostly there is one
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
        """What `find` comes to give (the lock is held, and let go meanwhile)."""

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

    # --- what they do: each finder is asked with the lock held ---

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
            if entry is not None:  # else handed out before anything was to be done for it here
                tasks = self._tasks_of(number, entry)
        except ClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  carried to the caller
            self._fail(number, error)
            return
        with self._lock:
            self._opening = False
        if entry is not None:
            self._enter(number, entry, tasks)

    def _tasks_of(self, number: int, entry: _Entry) -> Sequence[Task]:
        """The tasks of a batch, once processes that share have made the rest of it."""
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
            # A batch that failed needs no more work; only an earlier record's error is worth finding.
            if entry.error is None or key < entry.error_at:
                task()
        except BaseException as raised:  # noqa: BLE001  carried to the caller, at the batch it belongs to
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
        except BaseException as raised:  # noqa: BLE001  carried to the caller
            entry.error = raised
        if self.record is not None and entry.operation:
            self.record.end(entry.operation, entry.error)
            entry.operation = 0
        with self._lock:
            entry.done = True
            self._changed.notify_all()

    def _fail(self, number: int, error: BaseException) -> None:
        """No batch from `number` on can be made."""
        with self._lock:
            if self._failed is None or number < self._failed[0]:
                self._failed = number, error
            self._changed.notify_all()
