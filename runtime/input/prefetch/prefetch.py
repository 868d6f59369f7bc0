"""Work ahead: a bounded ring of batches in the making, filled by threads, handed out in order.

A batch is made in two stages of independent tasks. Between them, where processes share a value, stand
two waits on other processes, each with a thread of its own: for a slot to write to, and for a slot that
all have filled. Where nothing is left to do in the second stage the ring is direct: the thread that finds no
task waits for the next slot, and the caller for what all have filled, so that no batch is passed from thread
to thread. Threads hold the ring and never the iterator in front of it, so an iterator that is
forgotten is collected, and that closes the ring.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.stages.batch_builder import BatchBuilder, Task

if TYPE_CHECKING:
    from commplan.runtime.input.shm.shm_channel import SharedRing
    from commplan.runtime.input.stages.worker_pool import Workers

PATIENCE = 1.0  # seconds for threads to end in after an interruption


class ClosedError(Exception):
    """The ring was closed while a batch was waited for."""


@dataclass
class _Entry:
    making: BatchBuilder
    todo: int = 0
    error: BaseException | None = None
    error_at: int = 0
    done: bool = False
    item: HostBatch | None = None


@dataclass
class Prefetcher:
    """start: makes batch `number`, counted from 0, or None where the work halts for now: `admit` and `look`
    ask again.

    depth: batches admitted and not yet handed out, at most. threads: how many work. peers: None in one
    process. workers: what the threads leave their work to; None: they do it. direct: see above.
    """

    start: Callable[[int], BatchBuilder | None]
    depth: int
    threads: int
    name: str
    peers: SharedRing | None = None
    workers: Workers | None = None
    direct: bool = False
    # Entered as the lock itself and waited on as the condition: a condition is entered by a Python function,
    # in which Ctrl-C may strike after the lock is taken and before anything will give it back.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)
    _entries: dict[int, _Entry] = field(default_factory=dict[int, _Entry])
    _tasks: list[tuple[int, int, int, Task]] = field(default_factory=list[tuple[int, int, int, Task]])
    _to_write: deque[int] = field(default_factory=deque[int])
    _to_read: deque[int] = field(default_factory=deque[int])
    _ties: itertools.count[int] = field(default_factory=itertools.count)
    _running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _begun: bool = False  # all of them are started
    _alive: int = 0  # threads, and callers that wait for peers
    _opened: int = 0
    _opening: bool = False
    _admitted: int = 0
    _handed: int = 0
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
                self._admit(self._admitted, making)
            if self._running:
                if self.direct and not self._has_work():
                    return
                self._changed.notify_all()

    def _admit(self, number: int, making: BatchBuilder) -> None:
        """All of it, or by an interruption nothing (the lock is held)."""
        try:
            self._entries[number] = _Entry(making)
            if self.peers is None:
                self._enter(number, 1, making.second())
            elif not self.direct:
                self._to_write.append(number)
            self._admitted = number + 1
        except BaseException:
            self._entries.pop(number, None)
            self._tasks[:] = [task for task in self._tasks if task[0] != number]
            heapq.heapify(self._tasks)
            if number in self._to_write:
                self._to_write.remove(number)
            raise

    def look(self, number: int | None = None) -> tuple[HostBatch, int, float]:
        """Batch `number` (None: the next one), how many lay ready, and the seconds waited. Raises what its
        making raised. The batch stays until `pass_on` says that it has come: a caller that was interrupted on
        the way asks again."""
        try:
            if self.direct and self.peers is not None:
                return self._take_direct(self.peers)
            return self._take(self._handed if number is None else number)
        except KeyboardInterrupt:
            self._interrupted = True
            raise

    def _take(self, number: int) -> tuple[HostBatch, int, float]:
        self.admit()
        begin = time.perf_counter()
        with self._lock:
            ready = sum(entry.done for entry in self._entries.values())
            while not self._closed and not ((entry := self._entries.get(number)) and entry.done):
                self._changed.wait()
            waited = time.perf_counter() - begin
            entry = self._entries.get(number)
            if self._closed or entry is None:
                raise ClosedError
            if entry.error:
                raise entry.error
            item = entry.item
        if item is None:
            raise RuntimeError("a batch was finished without a result")
        return item, ready, waited

    def _take_direct(self, peers: SharedRing) -> tuple[HostBatch, int, float]:
        if self._admitted == self._handed:  # else as many as there is room for were admitted with the last
            self.admit()
        with self._lock:
            number = self._handed
            entry = self._entries.get(number)
            if self._closed or entry is None:
                raise ClosedError
            self._alive += 1
        try:
            ready = min(peers.ahead(number), self.depth)
            begin = time.perf_counter()
            if entry.item is None:
                entry.item = self._completed(number, entry, peers)
            waited = time.perf_counter() - begin
        finally:
            self._ended()
        return entry.item, ready, waited

    def pass_on(self, number: int) -> None:
        """All batches before `number` have come; what there is room for now is started."""
        with self._lock:
            if number <= self._handed:
                return
            before, self._handed = self._handed, number
            for old in range(before, number):
                self._entries.pop(old, None)
        self.admit()

    def _completed(self, number: int, entry: _Entry, peers: SharedRing) -> HostBatch:
        """The batch, once all have filled it; what went wrong here comes before what peers say of it."""
        try:
            if (entry.error is None or peers.leads()) and not peers.readable(number):
                raise ClosedError
        except Exception:
            if entry.error is None:
                raise
        if entry.error is not None:
            raise entry.error
        for task in entry.making.second():
            task()
        return entry.making.finish()

    def depth_now(self) -> tuple[int, int]:
        """Batches that lie ready now, and how many may be made ahead at most."""
        with self._lock:
            ready = sum(entry.done for entry in self._entries.values())
            if self.direct and self.peers is not None and not self._closed:
                ready = min(self.peers.ahead(self._handed), self.depth)
            return ready, self.depth

    def ready(self, number: int) -> bool:
        """Whether `look` would return batch `number` at once, where the ring is not direct."""
        with self._lock:
            entry = self._entries.get(number)
            return entry is not None and entry.done

    def close(self) -> None:
        """Stop, join every thread and leave the peers. May be called twice, and from any thread.

        After an interruption, threads that are still busy a second later are left to end on their own: what
        was interrupted may hang.
        """
        if os.getpid() != self._process:
            return
        running = self._running
        self.abandon()
        deadline = time.monotonic() + PATIENCE
        for thread in running:
            if thread is threading.current_thread() or thread.ident is None:  # interrupted before its start
                continue
            thread.join(max(0.0, deadline - time.monotonic()) if self._interrupted else None)

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
        if self.workers is not None:
            self.workers.close()
        if peers is not None:
            peers.leave()

    # --- the threads' side ---

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
        targets: list[Callable[[], None]] = [self._work] * self.threads
        if self.direct and self.peers is not None:
            first = self.peers.fills()
            if first is None:
                return []
            self._opened = first
        elif self.peers is not None:
            targets += [
                functools.partial(self._await, self._to_write, first=True),
                functools.partial(self._await, self._to_read, first=False),
            ]
        # Daemons, so that a forgotten iterator cannot keep the interpreter alive; they are joined by
        # `close`, which a finaliser calls at the latest when the interpreter exits.
        return [
            threading.Thread(target=self._run, args=(target,), name=f"{self.name}-{number}", daemon=True)
            for number, target in enumerate(targets)
        ]

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            if self.workers is not None:
                self.workers.leave()
            self._ended()

    def _ended(self) -> None:
        with self._lock:
            self._alive -= 1
            last = self._closed and self._alive == 0
        if last:
            self._depart()

    def _enter(self, number: int, stage: int, tasks: Sequence[Task]) -> None:
        """Queue the tasks of a stage (the lock is held); a stage without tasks still takes one turn."""
        tasks = tasks or (lambda: None,)
        self._entries[number].todo = len(tasks)
        for place, task in enumerate(tasks):
            heapq.heappush(self._tasks, (number, stage * 1_000_000 + place, next(self._ties), task))
        self._changed.notify_all()

    def _carry_out(self, number: int, key: int, task: Task) -> None:
        entry = self._entries.get(number)
        # A batch that failed needs no more work; only an earlier record's error is worth finding.
        skip = entry is None or (entry.error is not None and key > entry.error_at)
        error: BaseException | None = None
        try:
            if not skip:
                task()
        except BaseException as raised:  # noqa: BLE001  carried to the caller, at the batch it belongs to
            error = raised
        self._finished(number, key, error)

    def _work(self) -> None:
        """Tasks, and in a direct ring, where there is none, the next batch that may be begun."""
        while True:
            with self._lock:
                while not (self._closed or self._has_work()):
                    self._changed.wait()
                if self._closed:
                    return
                if self._tasks:
                    number, key, _, task = heapq.heappop(self._tasks)
                else:
                    number, self._opened, self._opening = self._opened, self._opened + 1, True
                    key, task = 0, None
            if task is not None:
                self._carry_out(number, key, task)
            elif not self._open(number):
                return

    def _has_work(self) -> bool:
        """Whether there is a task, or in a direct ring a batch to begin. Those that are made without this
        process are passed over, so that its threads are woken for its own alone."""
        if self._tasks or not self.direct:
            return bool(self._tasks)
        while not self._opening and self._opened < self._admitted:
            if self.peers is None or not self.peers.passes(self._opened):
                return True
            self._opened += 1
        return False

    def _open(self, number: int) -> bool:
        """Wait for the slot of batch `number` and begin it; False where the work is at its end."""
        entry, peers = self._entries.get(number), self.peers
        if entry is None or peers is None:  # handed out before anything was to be done for it here
            self._opening = False
            return peers is not None
        try:
            if not peers.writable(number):
                return False
            tasks = entry.making.first() or (lambda: None,)
        except BaseException as raised:  # noqa: BLE001  as above
            entry.error = raised
            peers.fail(number, raised)
            return False  # nobody opens any later batch either: `_opening` stays
        with self._lock:
            self._opening = False
            entry.todo = len(tasks)
            for place, task in enumerate(tasks[1:], 1):
                heapq.heappush(self._tasks, (number, place, next(self._ties), task))
            if self.threads > 1:
                self._changed.notify_all()
        self._carry_out(number, 0, tasks[0])
        return True

    def _finished(self, number: int, key: int, error: BaseException | None) -> None:
        with self._lock:
            entry = self._entries.get(number)
            if entry is None:
                return
            if error is not None and (entry.error is None or key < entry.error_at):
                entry.error, entry.error_at = error, key
            entry.todo -= 1
            if entry.todo:
                return
        try:
            if key < 1_000_000:
                entry.making.publish(entry.error)
                if self.direct:
                    return
                if entry.error is None or (self.peers is not None and self.peers.leads()):
                    with self._lock:
                        self._to_read.append(number)
                        self._changed.notify_all()
                    return
            elif entry.error is None:
                self._finish(entry)
                return
        except BaseException as raised:  # noqa: BLE001  as above
            entry.error = raised
        with self._lock:
            entry.done = True
            self._changed.notify_all()

    def _await(self, queue: deque[int], *, first: bool) -> None:
        peers = self.peers
        waiting = 0  # batches become readable in order, whatever order they were finished in
        while peers is not None:
            with self._lock:
                while not (queue and (first or waiting in queue)) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                number = queue.popleft() if first else waiting
                if not first:
                    queue.remove(number)
                    waiting += 1
                entry = self._entries[number]
            try:
                if not (peers.writable(number) if first else peers.readable(number)):
                    return
                if entry.error is not None:
                    raise entry.error
                tasks = entry.making.first() if first else entry.making.second()
            except BaseException as raised:  # noqa: BLE001  as above
                with self._lock:
                    entry.error, entry.done = entry.error or raised, True
                    self._changed.notify_all()
                return  # without its peers this process cannot make any later batch either
            if not first and not tasks:
                self._finish(entry)
                continue
            with self._lock:
                if self._closed:
                    return
                self._enter(number, 0 if first else 1, tasks)

    def _finish(self, entry: _Entry) -> None:
        try:
            entry.item = entry.making.finish()
        except BaseException as raised:  # noqa: BLE001  as above
            entry.error = raised
        with self._lock:
            entry.done = True
            self._changed.notify_all()
