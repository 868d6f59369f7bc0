"""Work ahead: a bounded ring of batches in the making, filled by threads, handed out in order.

A batch is made in two stages of independent tasks. Between them, where processes share a value, stand
two waits on other processes, each with a thread of its own: for a slot to write to, and for a slot that
all have filled. Threads hold the ring and never the iterator in front of it, so an iterator that is
forgotten is collected, and that closes the ring.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

PATIENCE = 1.0  # seconds for threads to end in after an interruption
Task = Callable[[], None]
Item = TypeVar("Item")
Made_co = TypeVar("Made_co", covariant=True)


class ClosedError(Exception):
    """The ring was closed while a batch was waited for."""


class Making(Protocol[Made_co]):
    """One batch in the making."""

    def first(self) -> Sequence[Task]:
        """Tasks that may start as soon as there is room; none is fine."""
        ...

    def publish(self, error: BaseException | None) -> None:
        """The first stage is over; `error` is what went wrong in it."""
        ...

    def second(self) -> Sequence[Task]:
        """Tasks that may start once every process has published."""
        ...

    def finish(self) -> Made_co:
        """All tasks are done: the batch."""
        ...


class Peers(Protocol):
    """The waits on other processes. Each raises where it cannot go on; `stop` makes both return False."""

    def owes(self) -> bool:
        """Whether even a batch that failed here is waited for, because others wait for this process."""
        ...

    def writable(self, number: int) -> bool: ...

    def readable(self, number: int) -> bool: ...

    def stop(self) -> None: ...

    def leave(self) -> None: ...


class Workers(Protocol):
    """What threads wait for that must end with them."""

    def stop(self) -> None:
        """Make every such wait return."""
        ...

    def leave(self) -> None:
        """The calling thread ends."""
        ...

    def close(self) -> None:
        """All threads have ended."""
        ...


@dataclass
class _Entry(Generic[Item]):
    making: Making[Item]
    todo: int = 0
    error: BaseException | None = None
    error_at: int = 0
    done: bool = False
    item: Item | None = None


@dataclass
class Ring(Generic[Item]):
    """start: makes batch `number`, counted from 0, or None where the work halts for now: `admit` and `take`
    ask again.

    depth: batches admitted and not yet handed out, at most. threads: how many work. peers: None in one
    process. workers: what the threads leave their work to; None: they do it.
    """

    start: Callable[[int], Making[Item] | None]
    depth: int
    threads: int
    name: str
    peers: Peers | None = None
    workers: Workers | None = None
    # Entered as the lock itself and waited on as the condition: a condition is entered by a Python function,
    # in which Ctrl-C may strike after the lock is taken and before anything will give it back.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)
    _entries: dict[int, _Entry[Item]] = field(default_factory=dict[int, "_Entry[Item]"])
    _tasks: list[tuple[int, int, int, Task]] = field(default_factory=list[tuple[int, int, int, Task]])
    _to_write: deque[int] = field(default_factory=deque[int])
    _to_read: deque[int] = field(default_factory=deque[int])
    _ties: itertools.count[int] = field(default_factory=itertools.count)
    _running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _alive: int = 0
    _admitted: int = 0
    _handed: int = 0
    _closed: bool = False
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
                    return
                number, self._admitted = self._admitted, self._admitted + 1
                self._entries[number] = _Entry(making)
                if self.peers is None:
                    self._enter(number, 1, making.second())
                else:
                    self._to_write.append(number)
            self._changed.notify_all()

    def take(self) -> tuple[Item, int, float]:
        """The next batch, how many lay ready, and the seconds waited. Raises what its making raised."""
        try:
            return self._take()
        except KeyboardInterrupt:
            self._interrupted = True
            raise

    def _take(self) -> tuple[Item, int, float]:
        self.admit()
        begin = time.perf_counter()
        with self._lock:
            ready = sum(entry.done for entry in self._entries.values())
            while not self._closed and not ((entry := self._entries.get(self._handed)) and entry.done):
                self._changed.wait()
            waited = time.perf_counter() - begin
            entry = self._entries.get(self._handed)
            if self._closed or entry is None:
                raise ClosedError
            if entry.error:
                raise entry.error
            del self._entries[self._handed]
            self._handed += 1
            item = entry.item
        self.admit()
        if item is None:
            raise RuntimeError("a batch was finished without a result")
        return item, ready, waited

    def depth_now(self) -> tuple[int, int]:
        """Batches that lie ready now, and how many may be made ahead at most."""
        with self._lock:
            return sum(entry.done for entry in self._entries.values()), self.depth

    def ready(self) -> bool:
        """Whether `take` would return at once."""
        with self._lock:
            entry = self._entries.get(self._handed)
            return entry is not None and entry.done

    def close(self) -> None:
        """Stop, join every thread and leave the peers. May be called twice, and from any thread.

        After an interruption, threads that are still busy a second later are left to end on their own: what
        was interrupted may hang.
        """
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
        what the interrupted code holds."""
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
        if self._running:
            return
        targets: list[Callable[[], None]] = [self._work] * self.threads
        if self.peers is not None:
            targets += [self._await_slots, self._await_peers]
        for number, target in enumerate(targets):
            # Daemons, so that a forgotten iterator cannot keep the interpreter alive; they are joined by
            # `close`, which a finaliser calls at the latest when the interpreter exits.
            thread = threading.Thread(
                target=self._run, args=(target,), name=f"{self.name}-{number}", daemon=True
            )
            self._running.append(thread)
            self._alive += 1
            thread.start()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            if self.workers is not None:
                self.workers.leave()
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

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                number, key, _, task = heapq.heappop(self._tasks)
                entry = self._entries[number]
                # A batch that failed needs no more work; only an earlier record's error is worth finding.
                skip = entry.error is not None and key > entry.error_at
            error: BaseException | None = None
            try:
                if not skip:
                    task()
            except BaseException as raised:  # noqa: BLE001  carried to the caller, at the batch it belongs to
                error = raised
            self._finished(number, key, error)

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
                if entry.error is None or (self.peers is not None and self.peers.owes()):
                    with self._lock:
                        self._to_read.append(number)
                        self._changed.notify_all()
                    return
            elif entry.error is None:
                entry.item = entry.making.finish()
        except BaseException as raised:  # noqa: BLE001  as above
            entry.error = raised
        with self._lock:
            entry.done = True
            self._changed.notify_all()

    def _await_slots(self) -> None:
        self._await(self._to_write, first=True)

    def _await_peers(self) -> None:
        self._await(self._to_read, first=False)

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
            with self._lock:
                if self._closed:
                    return
                self._enter(number, 0 if first else 1, tasks)
