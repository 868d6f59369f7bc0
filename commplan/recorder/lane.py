"""What a process does beside its collectives, as it happens: any number of threads write it."""

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
# a worker asks servers for something; `serve`: a server has heard some of it, and not answered it whole.
Kind = Literal["make", "wait", "request", "serve"]
_HEAD = struct.Struct("<q")


class Lane:
    """Writes the events of a recording that nothing else writes. An entry takes about a microsecond."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._lock = threading.RLock()  # of what follows, and of the memory; a collector may come in between
        self._names: dict[str, int] = {}
        self._head, self._operations = 0, 0

    def name(self, where: str, kind: Kind, shared: str = "-") -> int:
        """The number of a name. where: such as `line 9 of x.plan`. shared: a word that those have in common
        who do this together."""
        text = f"{where[:90]}\0{Details(kind, shared, 0, '-', 0, '', ()).text()}"
        with self._lock:
            if text not in self._names:
                self._names[text] = min(len(self._names), MOST_NAMES - 1)
                put_name(self.recording.memory, self._names[text], text)
            return self._names[text]

    def begin(self, name: int, runs: int, detail: int) -> int:
        """Something has begun; the number of the operation. runs: that of a batch or a request, from 1.
        detail: the epoch << 32 | step of a batch, or the rank that has asked."""
        with self._lock:
            self._operations += 1
            self._put(BEGIN, name, self._operations, runs, detail)
            return self._operations

    def end(self, name: int, operation: int, runs: int, *, failed: bool = False) -> None:
        """It has ended. failed: the record is kept."""
        with self._lock:
            self._put(FAILED if failed else END, name, operation, runs, 0)
            if failed:
                _HEAD.pack_into(self.recording.memory, FAILURES, 1)

    def awaits(self, name: int, operation: int, rank: int) -> None:
        """What has begun waits for this rank."""
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
    """The lane of the run of `plan` (None: of any) that this process records; None where it records none,
    or, with a warning, where the file cannot be made."""
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
    """Have `tell` asked where others wait for this process: what it does that lasts, or nothing."""
    _activities.append(tell)
    return tell


def activity() -> str:
    """What this process does that lasts; empty where it does nothing of the kind."""
    return "; ".join(filter(None, (tell() for tell in _activities)))
