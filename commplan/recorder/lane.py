"""Records the operations of a process that are not collectives, such as batches and requests to servers.

Each lane of operations has a record file of its own. Any number of threads may write to it.
"""

from __future__ import annotations

import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Literal

from commplan.recorder.file import (
    BEGIN,
    CAPACITY,
    END,
    EVENT,
    EVENTS,
    FAILED,
    FAILURES,
    HEAD,
    MOST_NAMES,
    ROUND,
    Details,
    Recording,
    put_name,
    recording_of,
)

# The kinds of operations of lanes:
# - make: a process makes its part of a batch, or all of it.
# - wait: the program waits for a batch.
# - request: a worker sends a request to servers.
# - serve: a server has received a part of a request, and has not answered all of it.
Kind = Literal["make", "wait", "request", "serve"]
_INTEGER = struct.Struct("<q")  # a number in the header
_WHERE = 90  # maximum characters of a position: 36 bytes of a name are left for the details


class Lane:
    """Writes the events of a recording, as its only writer. An event takes about a microsecond.

    Attributes:
        recording: The record of the lane, which has no events yet.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._lock = threading.RLock()  # for the attributes below and the memory; reentrant for finalizers
        self._names: dict[str, int] = {}
        self._head = 0  # the number of written events
        self._operations = 0  # the number of operations that have begun

    def name(self, where: str, kind: Kind, shared: str = "-") -> int:
        """Return the number of a name, which is added to the record on the first call.

        Names that do not fit in the record share the last number and overwrite each other.

        Args:
            where: The position in the plan, such as `line 9 of x.plan`.
            kind: The kind of operation.
            shared: A word without spaces that is equal on all ranks that share the operation; `-` if there is
                none.
        """
        text = f"{where[:_WHERE]}\0{Details(kind, shared, 0, '-', 0, '', ()).text()}"
        with self._lock:
            if text not in self._names:
                self._names[text] = min(len(self._names), MOST_NAMES - 1)
                put_name(self.recording.memory, self._names[text], text)
            return self._names[text]

    def begin(self, name: int, runs: int, detail: int) -> int:
        """Record the begin of an operation.

        Args:
            name: The result of `self.name`.
            runs: The number of the batch or the request, from 1.
            detail: `epoch << 32 | step` of a batch, or the rank that sent the request.

        Returns:
            The number of the operation, from 1.
        """
        with self._lock:
            self._operations += 1
            self._put(BEGIN, name, self._operations, runs, detail)
            return self._operations

    def end(self, name: int, operation: int, runs: int, *, failed: bool = False) -> None:
        """Record the end of an operation, with the arguments and the result of `begin`.

        If it has `failed`, the record is kept after the end of the process.
        """
        with self._lock:
            self._put(FAILED if failed else END, name, operation, runs, 0)
            if failed:
                _INTEGER.pack_into(self.recording.memory, FAILURES, 1)

    def awaits(self, name: int, operation: int, rank: int) -> None:
        """Record that an operation waits for `rank`, in the packed form that `blame.Progress` describes."""
        with self._lock:
            self._put(ROUND, name, operation, 0, 2 * rank)

    def _put(self, kind: int, name: int, operation: int, runs: int, detail: int) -> None:
        """Write an event of kind `kind` (see `file.Event`) to the ring. The caller holds the lock."""
        memory, head = self.recording.memory, self._head
        place = EVENTS + head % CAPACITY * EVENT.size
        EVENT.pack_into(memory, place, time.monotonic_ns(), kind, name, operation, runs, detail)
        self._head = head + 1
        _INTEGER.pack_into(memory, HEAD, head + 1)  # after the event: readers see complete events only


# The lanes of this process, by recording and name.
_lanes: weakref.WeakKeyDictionary[Recording, dict[str, Lane]] = weakref.WeakKeyDictionary()
_lanes_lock = threading.Lock()  # protects `_lanes`
_activities: list[Callable[[], str]] = []  # see `on_activity`


def lane_of(plan: str | None, name: str) -> Lane | None:
    """The lane of this process for runs of a plan.

    Args:
        plan: The name of the plan; None for the first run of this process, whatever its plan.
        name: The name of the lane, see `file.Record`.

    Returns:
        The lane, created on the first call; None if this process records no such run, or, with a
        RuntimeWarning, if the file cannot be created.
    """
    recording = recording_of(plan)
    if recording is None:
        return None
    with _lanes_lock:
        lanes = _lanes.setdefault(recording, {})
        if name not in lanes:
            try:
                lanes[name] = Lane(recording.lane(name))
            except OSError as error:
                warnings.warn(f"the {name} of this run is not recorded: {error}", RuntimeWarning, 3)
                return None
        return lanes[name]


def on_activity(describe: Callable[[], str]) -> Callable[[], str]:
    """Register a function that the sidecar calls, through `activity`, if other processes wait for this one.

    Args:
        describe: Returns a description of an activity of this process that takes long; "" if there is none.

    Returns:
        `describe`, for use as a decorator.
    """
    _activities.append(describe)
    return describe


def activity() -> str:
    """The activities of this process that take long, separated by semicolons; empty if there are none."""
    return "; ".join(filter(None, (describe() for describe in _activities)))
