"""Configures the engine's watchdog: time limits, flight records, and the stack of a late rank."""

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

FIRST = 12  # times the bound in the first three runs of a collective, since late ranks may be compiling
_VERDICT = 4096  # maximum number of bytes of a verdict
_WRITER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_libraries: list[Any] = []


class Watched(NamedTuple):
    """Settings of a watched channel, the same on all of its ranks.

    Attributes:
        bound_s: See `Channel`.
        busy_s: See `Channel`.
        job: A random name of the run, chosen by rank 0.
        plan: The name of the plan.
    """

    bound_s: float
    busy_s: float
    job: str
    plan: str


def job() -> str:
    """A random name for a run."""
    return secrets.token_hex(4)


def start(
    library: Any, channel: int, watched: Watched, rank: int, axes: Mapping[str, int]
) -> Recording | None:
    """Watch a channel and record its operations. All of its ranks must call this together."""
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
        # The engine writes to it until MPI is finalized, after Python has shut down.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(recording.memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(recording.memory))
    bound, busy = int(watched.bound_s * 1e9), int(watched.busy_s * 1e9)
    library.commplan_channel_watch(channel, bound, FIRST * bound, busy, address)


class RequestWatch(NamedTuple):
    """The watched channel of workers and servers. `recording` is the record of this server, if it has one."""

    library: Any
    channel: int
    recording: Recording | None = None

    @classmethod
    def begin(cls, library: Any, channel: int, watched: Watched, rank: int, ranks: int, workers: int) -> Self:
        """Watch a channel of `workers` workers and their servers. All of its ranks must call this together.

        The engine records the requests of workers; servers write their own records.
        """
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
        self, *, waits: bool, patient: bool, moved: bool, awaited: Sequence[int], finished: Sequence[int]
    ) -> None:
        """Report the state of a server. A server that has not reported for a second counts as busy.

        Args:
            waits: Whether some worker waits for another worker.
            patient: Whether the server has its own timeout for that.
            moved: Whether anything has arrived since the last report.
            awaited: Ranks that have no unanswered request: the server waits for their next one.
            finished: Ranks that will send no more requests.
        """
        ranks = (ctypes.c_int32 * (len(awaited) + len(finished)))(*awaited, *finished)
        self.library.commplan_channel_serve(
            self.channel, waits, patient, moved, ranks, len(awaited), len(finished)
        )

    def verdict(self) -> str:
        """The verdict on the rank that blocks the others; empty while there is none."""
        text = ctypes.create_string_buffer(_VERDICT + 1)
        self.library.commplan_channel_verdict(self.channel, text, _VERDICT)
        return text.value.decode(errors="replace")


def forget(recording: Recording) -> None:
    """Delete a record after its run has ended successfully on all ranks."""
    recording.remove()
    atexit.unregister(recording.remove)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(recording.memory))


@contextmanager
def expected_late() -> Generator[None]:
    """Tell the watchdogs of other ranks that this process will join later."""
    for library in _libraries:
        library.commplan_add_busy(1)
    try:
        yield
    finally:
        for library in _libraries:
            library.commplan_add_busy(-1)


def main_stack() -> str:
    """The user's stack in the main thread, innermost frame first, and the current long activity if any."""
    return "; ".join(filter(None, (shown(own_frames()), activity())))


@_WRITER
def _write_stack(address: int, most: int) -> None:
    """The stack as UTF-8 that ends with a zero byte."""
    text = main_stack().encode()[:most]
    ctypes.memmove(address, text + b"\0", len(text) + 1)
