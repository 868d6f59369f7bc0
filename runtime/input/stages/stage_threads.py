"""`StageThreads`: the threads for the stages that each process runs itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from commplan.diagnostics import fail
from commplan.runtime.input.observe.wait_log import ClosedError

_Entry = tuple["Future[None]", Callable[[], object]]  # a task, and the future that its caller has


@dataclass(eq=False)
class StageThreads:
    """Up to `most` threads that begin tasks in the order of their submission.

    Unlike those of `ThreadPoolExecutor`, they are daemons: a user function may hang, and the interpreter's
    exit must not wait for it.

    Attributes:
        most: the maximum number of threads. Each submission starts one while there are fewer.
        name: the prefix of the names of threads.
        running: the threads that have been started. They end after `close`.
    """

    most: int
    name: str
    running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    # The tasks that no thread has begun. After `close`, None ends a thread.
    _queue: SimpleQueue[_Entry | None] = field(default_factory=SimpleQueue["_Entry | None"])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def submit(self, task: Callable[[], object]) -> Future[None]:
        """Run `task` in a thread.

        Returns:
            A future, whose result is None. It raises the exception of the task, or `ClosedError`.

        Raises:
            ClosedError: after `close`.
            CommplanError: CP0928 if no thread runs and none can be started.
        """
        if self._is_closed:
            raise ClosedError
        with self._lock:
            if len(self.running) < self.most:
                self._start()
        future: Future[None] = Future()
        self._queue.put((future, task))
        if self._is_closed:  # since the check above
            self.close()
        return future

    def _start(self) -> None:
        """Start a thread, if the system allows it. Raises CP0928 if none runs otherwise."""
        name = f"{self.name}-{len(self.running)}"
        thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self.running:
                fail("CP0928", f"no thread of {self.name} can be started: {error}", "ulimit -u")
        else:
            self.running.append(thread)

    def close(self) -> None:
        """End the threads after their current tasks. The other tasks fail with `ClosedError`.

        Finalizers call this at any point of any thread, so it takes no lock.
        """
        self._is_closed = True
        with contextlib.suppress(Empty):
            while True:
                entry = self._queue.get_nowait()
                if entry is not None and entry[0].set_running_or_notify_cancel():
                    entry[0].set_exception(ClosedError())
        self._queue.put(None)


def _run(queue: SimpleQueue[_Entry | None]) -> None:
    """Run the tasks of `queue` until it returns None. Keeps no reference to `StageThreads`, nor to tasks."""
    while (entry := queue.get()) is not None:
        future, task = entry
        if future.set_running_or_notify_cancel():
            try:
                task()
            except BaseException as error:  # noqa: BLE001  the caller of `Future.result` raises it
                future.set_exception(error)
            else:
                future.set_result(None)
        del entry, future, task  # a waiting thread must not keep a batch
    queue.put(None)  # ends the next thread
