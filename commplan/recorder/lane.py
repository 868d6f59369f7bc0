"""Records the operations of a process that are not collectives. Any number of threads write them."""

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

# `make`: a process makes its part of a batch, or all of it. `wait`: the program waits for a batch. `request`:
# a worker sends a request to servers. `serve`: a server has received a part, and not yet answered it all.
Kind = Literal["make", "wait", "request", "serve"]
_HEAD = struct.Struct("<q")


class Lane:
    """Writes the events of a recording, as its only writer. An event takes about a microsecond."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._lock = threading.RLock()  # for the attributes below and the memory; reentrant for finalizers
        self._names: dict[str, int] = {}
        self._head, self._operations = 0, 0

    def name(self, where: str, kind: Kind, shared: str = "-") -> int:
        """The number of a name.

        Args:
            where: the position in the plan, such as `line 9 of x.plan`.
            kind: the kind of operation.
            shared: a word that is equal on all ranks that share the operation.
        """
        text = f"{where[:90]}\0{Details(kind, shared, 0, '-', 0, '', ()).text()}"
        with self._lock:
            if text not in self._names:
                self._names[text] = min(len(self._names), MOST_NAMES - 1)
                put_name(self.recording.memory, self._names[text], text)
            return self._names[text]

    def begin(self, name: int, runs: int, detail: int) -> int:
        """Record the begin of an operation.

        Args:
            name: the number of its name.
            runs: the number of the batch or the request, from 1.
            detail: `epoch << 32 | step` of a batch, or the rank that sent the request.

        Returns:
            The number of the operation.
        """
        with self._lock:
            self._operations += 1
            self._put(BEGIN, name, self._operations, runs, detail)
            return self._operations

    def end(self, name: int, operation: int, runs: int, *, failed: bool = False) -> None:
        """Record the end of an operation. If it has `failed`, the record is kept."""
        with self._lock:
            self._put(FAILED if failed else END, name, operation, runs, 0)
            if failed:
                _HEAD.pack_into(self.recording.memory, FAILURES, 1)

    def awaits(self, name: int, operation: int, rank: int) -> None:
        """Record that an operation waits for `rank`."""
        with self._lock:
            self._put(ROUND, name, operation, 0, 2 * rank)

    def _put(self, kind: int, name: int, operation: int, runs: int, detail: int) -> None:
        memory, head = self.recording.memory, self._head
        place = EVENTS + head % CAPACITY * EVENT.size
        EVENT.pack_into(memory, place, time.monotonic_ns(), kind, name, operation, runs, detail)
        self._head = head + 1
        _HEAD.pack_into(memory, HEAD, head + 1)


_lanes: weakref.WeakKeyDictionary[Recording, dict[str, Lane]] = weakref.WeakKeyDictionary()
_making = threading.Lock()
_activities: list[Callable[[], str]] = []


def lane_of(plan: str | None, name: str) -> Lane | None:
    """The lane of a run of `plan` (None: of any plan) in this process.

    None if this process records no run, or, with a warning, if the file cannot be created.
    """
    recording = recording_of(plan)
    if recording is None:
        return None
    with _making:
        lanes = _lanes.setdefault(recording, {})
        if name not in lanes:
            try:
                lanes[name] = Lane(recording.lane(name))
            except OSError as error:
                warnings.warn(f"the {name} of this run is not recorded: {error}", RuntimeWarning, 3)
                return None
        return lanes[name]


def on_activity(tell: Callable[[], str]) -> Callable[[], str]:
    """Register `tell`, which returns a long activity of this process, or "". Called if others wait for it."""
    _activities.append(tell)
    return tell


def activity() -> str:
    """The long activities of this process; empty if there are none."""
    return "; ".join(filter(None, (tell() for tell in _activities)))
