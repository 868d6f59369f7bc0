"""Events of the batches of a process in the record of its run: a batch is made, or awaited.

A thread of the process also records the rank that a long wait depends on, and long calls of user code. Other
processes read them to explain their own waits.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple

from commplan.diagnostics import text_of
from commplan.recorder.file import Call, path_of
from commplan.recorder.lane import Lane, on_activity
from commplan.recorder.reading import read_call
from commplan.recorder.stacks import shown, stacks
from commplan.runtime.input.group import Group
from commplan.runtime.input.observe.wait_log import log_warning
from commplan.runtime.input.program import EpochCursor
from commplan.runtime.input.stages import records

TICK_S = 0.5  # seconds between two checks for long waits and calls
_LASTS_S = 1.0  # seconds after which a wait, or a call of user code, is recorded


class Open(NamedTuple):
    """An operation that has not ended.

    Attributes:
        name: the number of its name in the lane, which determines its kind.
        number: the number of its batch.
        runs: the number of its batch over all epochs, see `EpochCursor.count`.
        since: when it began, on `time.monotonic`.
    """

    name: int
    number: int
    runs: int
    since: float


class BatchRecord:
    """Records the batches of one phase in this process. Any number of threads may call it.

    After `watch`, a background thread checks for long waits and calls.

    Attributes:
        lane: the lane of the record that it writes.
        where: the line of the plan, such as `line 9 of x.plan`.
        cursor: the positions of batches.
        group: the processes that share loads; None if this one is alone.
    """

    def __init__(self, lane: Lane, where: str, cursor: EpochCursor, group: Group | None) -> None:
        shared = group.run_id if group is not None else "-"
        self.lane, self.where, self.cursor, self.group = lane, where, cursor, group
        self._make, self._wait = (lane.name(where, kind, shared) for kind in ("make", "wait"))
        self._open: dict[int, Open] = {}  # by operation
        self._call: Callable[[], Call | None] = lambda: None  # see `watch`
        self._awaited: Callable[[], int] = lambda: -1  # see `watch`
        self._blocker: tuple[int, int] = (0, -1)  # the last recorded wait, and the rank that it waits for
        self._called: Call | None = None  # the last recorded call
        self._looking = threading.Lock()  # held while `_call` runs and its result is recorded

    def watch(self, call: Callable[[], Call | None], awaited: Callable[[], int]) -> None:
        """Begin to check for long waits and calls.

        Args:
            call: returns the call of user code that has not returned, with its start on `time.monotonic`.
            awaited: returns the process of the group that makes the awaited part; -1 for none.
        """
        self._call, self._awaited = call, awaited
        with _starting:
            _watched.add(self)
            if not _threads:
                _threads.append(threading.Thread(target=_look, name="commplan-input-record", daemon=True))
                _threads[0].start()

    def close(self) -> None:
        """Stop the checks, and record the end of all operations: no caller waits for them any more."""
        _watched.discard(self)
        with self._looking:
            self._call = lambda: None
            self._record_call()
        for operation in list(self._open):
            self.end(operation)

    def begin(self, kind: Literal["make", "wait"], number: int) -> int:
        """Record that batch `number` is begun, or awaited.

        Returns:
            The number of the operation for `end`, from 1.
        """
        epoch, step = self.cursor.at(number)
        name = self._make if kind == "make" else self._wait
        runs = self.cursor.count(number)
        operation = self.lane.begin(name, runs, epoch << 32 | step)
        self._open[operation] = Open(name, number, runs, time.monotonic())
        return operation

    def end(self, operation: int, error: BaseException | None = None) -> None:
        """Record the end of an operation. Has no effect if it has ended.

        Args:
            operation: a result of `begin`.
            error: the failure of the operation, if it ends the batches; else None.
        """
        entry = self._open.pop(operation, None)  # None if `close` has ended it already
        if entry is not None:
            self.lane.end(entry.name, operation, entry.runs, failed=error is not None)

    def rank(self, process: int) -> int:
        """The rank in the job of a process of the group; `process` itself without a group."""
        return self.group.rank(process) if self.group is not None else process

    def doing(self, process: int) -> str:
        """The activity of a process of the group, for the end of a sentence.

        Returns:
            Its long call of user code, else its Python stack, from its record. Empty if neither is available:
            the process keeps no record on this host.
        """
        if call := self._called_by(process):
            return call
        threads = stacks(path_of(self.lane.recording.job, self.rank(process)))
        calls = [frames for frames in map(_of_user, threads) if frames]
        return f"at {shown((calls or threads)[0])}" if threads else ""

    def _called_by(self, process: int) -> str:
        """The long call of user code in the record of a process of the group; empty if there is none."""
        call = read_call(path_of(self.lane.recording.job, self.rank(process), "input"))
        return call.sentence(time.monotonic()) if call else ""

    def look(self) -> None:
        """Record the awaited rank, and a long call. The background thread calls this repeatedly."""
        with self._looking:
            self._record_call()
        operation, wait = self._oldest()
        if wait is not None and time.monotonic() - wait.since >= _LASTS_S:
            process = self._awaited()
            blocker = operation, self.rank(process) if process >= 0 else -1
            if blocker[1] >= 0 and blocker != self._blocker:
                self._blocker = blocker
                self.lane.awaits(wait.name, *blocker)

    def _record_call(self) -> None:
        """Record the current call of user code if it is long, or that there is none. Holds `_looking`."""
        call = self._call()
        if call is not None and time.monotonic() - call.seconds < _LASTS_S:
            call = None
        if call != self._called:
            self.lane.recording.put_call(call)
            self._called = call

    def activity(self) -> str:
        """The batch that this process waits for, and its rank or call, for processes that wait for this one.

        Empty if it does not wait, or not for long.
        """
        _, wait = self._oldest()
        if wait is None or (waited := time.monotonic() - wait.since) < _LASTS_S:
            return ""
        text = f"for {waited:.1f} s it waits for batch {wait.runs} of {self.where}"
        process = self._awaited()
        if process >= 0:
            doing = self._called_by(process)
            text += f", for the part of rank {self.rank(process)}"
            return f"{text}, which is {doing}" if doing else text
        call = self._call()
        return f"{text}, {call.sentence(time.monotonic())}" if call else text

    def _oldest(self) -> tuple[int, Open | None]:
        """The oldest wait, by its number; (0, None) if there is none."""
        waits = [(key, entry) for key, entry in list(self._open.items()) if entry.name == self._wait]
        return min(waits, key=lambda entry: entry[1].since, default=(0, None))


_watched: weakref.WeakSet[BatchRecord] = weakref.WeakSet()  # the records that the background thread checks
_threads: list[threading.Thread] = []  # the background thread, while there are records to check
_starting = threading.Lock()  # protects both


def _after_fork() -> None:
    """Forget the records and the thread of the parent."""
    global _starting  # noqa: PLW0603  another thread of the parent may have held it
    _threads.clear()
    _watched.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _look() -> None:
    """Check all records, until there are none. The background thread runs it."""
    while True:
        time.sleep(TICK_S)
        with _starting:
            if not _watched:
                _threads.clear()
                return
        for record in list(_watched):
            try:
                record.look()
            except Exception as error:  # noqa: BLE001  the checks of other records go on
                _watched.discard(record)
                log_warning("waits of the input are no longer recorded: %s", text_of(error))


def _of_user(frames: list[str]) -> list[str]:
    """The frames of user code that a stage calls, innermost first; empty if there are none.

    Args:
        frames: the frames of a thread as `FILE:LINE in FUNCTION`, innermost first.
    """
    indices = [index for index, frame in enumerate(frames) if frame.startswith(f"{records.__file__}:")]
    return frames[: indices[0]] if indices else []


@on_activity
def activity() -> str:
    """The long waits for batches of this process, separated by semicolons."""
    return "; ".join(filter(None, (record.activity() for record in list(_watched))))
