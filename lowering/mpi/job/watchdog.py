"""The engine's watchdog from Python: its bounds, and what a rank says that is late."""

from __future__ import annotations

import atexit
import ctypes
import math
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from commplan.recorder.file import Recording, stacks_of_process, start_recording
from commplan.recorder.lane import activity
from commplan.recorder.stacks import own_frames, shown
from commplan.sidecar import attend

FIRST = 12  # times the bound, for a collective that has run three times at most: the late may be compiling
_VERDICT = 4096  # bytes of one, at most
_WRITER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_libraries: list[Any] = []


class Watched(NamedTuple):
    """A channel that is watched, alike on all of its ranks. bound_s, busy_s: see `Channel`. job: a name that
    no other run has; of rank 0. plan: its name."""

    bound_s: float
    busy_s: float
    job: str
    plan: str


def job() -> str:
    """A name that no other run has."""
    return secrets.token_hex(4)


def start(
    library: Any, channel: int, watched: Watched, rank: int, axes: Mapping[str, int]
) -> Recording | None:
    """Watch a channel, and record what it does. All of its ranks call this alike. axes: their sizes."""
    recording = start_recording(watched.job, watched.plan, rank, math.prod(axes.values()), axes)
    _watch(library, channel, watched, recording, rank)
    return recording


def _watch(library: Any, channel: int, watched: Watched, recording: Recording | None, rank: int) -> None:
    if not _libraries:
        _libraries.append(library)
        library.commplan_stack_writer(ctypes.cast(_write_stack, ctypes.c_void_p))
        atexit.register(library.commplan_stack_writer, None)
        atexit.register(library.commplan_stack_signal, b"", 0)
    address = None
    if recording is not None:
        attend(recording.path, f"rank {rank}")
        file, number = stacks_of_process()
        library.commplan_stack_signal(file.encode(), number)
        # The engine writes to it until MPI ends, which is after Python has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(recording.memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(recording.memory))
    bound, busy = int(watched.bound_s * 1e9), int(watched.busy_s * 1e9)
    library.commplan_channel_watch(channel, bound, FIRST * bound, busy, address)


class RequestWatch(NamedTuple):
    """The engine's channel of workers and servers, watched. recording: of what this server does, if any."""

    library: Any
    channel: int
    recording: Recording | None = None

    @classmethod
    def begin(cls, library: Any, channel: int, watched: Watched, rank: int, ranks: int, workers: int) -> Self:
        """Watch a channel of `workers` workers and their servers; all of its ranks call this alike. What
        workers ask is recorded; what servers do, they record themselves."""
        lane = "requests" if rank < workers else "server"
        recording = start_recording(watched.job, watched.plan, rank, ranks, lane=lane)
        if rank < workers:
            _watch(library, channel, watched, recording, rank)
            return cls(library, channel)
        _watch(library, channel, watched, None, rank)
        if recording is not None:
            attend(recording.path, f"rank {rank}")
        return cls(library, channel, recording)

    def serve(
        self, *, waits: bool, patient: bool, moved: bool, awaited: Sequence[int], gone: Sequence[int]
    ) -> None:
        """Say how a server is; one that has not for a second does something else.

        waits: whether some worker waits for others. patient: the server has a bound of its own for that.
        moved: whether anything came since the last time. awaited: ranks that have asked nothing that is not
        answered. gone: ranks that ask nothing more.
        """
        ranks = (ctypes.c_int32 * (len(awaited) + len(gone)))(*awaited, *gone)
        self.library.commplan_channel_serve(
            self.channel, waits, patient, moved, ranks, len(awaited), len(gone)
        )

    def verdict(self) -> str:
        """Who holds the others; empty while that cannot be said."""
        text = ctypes.create_string_buffer(_VERDICT + 1)
        self.library.commplan_channel_verdict(self.channel, text, _VERDICT)
        return text.value.decode(errors="replace")


def forget(recording: Recording) -> None:
    """Remove a record: its run has ended well on all ranks."""
    recording.remove()
    atexit.unregister(recording.remove)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(recording.memory))


@contextmanager
def expected_late() -> Generator[None]:
    """While this runs, the watchdogs of other ranks take it as said that this process comes later."""
    for library in _libraries:
        library.commplan_add_busy(1)
    try:
        yield
    finally:
        for library in _libraries:
            library.commplan_add_busy(-1)


def main_stack() -> str:
    """The user's program in the main thread, innermost first, and what this process does that lasts."""
    return "; ".join(filter(None, (shown(own_frames()), activity())))


@_WRITER
def _write_stack(address: int, most: int) -> None:
    """The stack as UTF-8 that ends with a zero byte."""
    text = main_stack().encode()[:most]
    ctypes.memmove(address, text + b"\0", len(text) + 1)
