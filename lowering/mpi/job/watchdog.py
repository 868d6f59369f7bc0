"""Connects the channels of the engine to the sidecar of the host.

A channel has a flight record, a mapped file. The engine writes events to it, and this module writes the time
limits. The sidecar reads it and writes a verdict if a rank blocks the others.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from commplan.hang_limits import HangLimits
from commplan.recorder import live
from commplan.recorder.file import Recording, start_recording
from commplan.recorder.lane import activity
from commplan.recorder.stacks import own_frames, shown
from commplan.sidecar import attend, introduce_hosts, unwatch

_late: list[None] = []  # one for each `expected_late` block that the program is in
_recordings: list[Recording] = []  # the records to which `expected_late` writes; see `put_state`


class Watched(NamedTuple):
    """Settings of a watched channel, the same on all of its ranks.

    Attributes:
        limits: See `Channel`; `watchdog_s` is not None.
        job: A random name of the run, chosen by rank 0.
        plan: The name of the plan.
    """

    limits: HangLimits
    job: str
    plan: str


def job() -> str:
    """A new random name for a run."""
    return secrets.token_hex(4)


def start(
    library: Any, channel: int, watched: Watched, comm: Any, rank: int, axes: Mapping[str, int]
) -> Recording | None:
    """Watch a channel and record its operations. All ranks of `comm` must call this together.

    Args:
        library: The engine.
        channel: The engine's handle of the channel.
        watched: The settings.
        comm: The communicator of the channel.
        rank: This rank in `comm`.
        axes: The sizes of the axes.

    Returns:
        The record; None if it could not be created.
    """
    recording = start_recording(watched.job, watched.plan, rank, math.prod(axes.values()), axes)
    _watch(recording, watched, comm)
    _record(library, channel, recording)
    return recording


def _watch(recording: Recording | None, watched: Watched, comm: Any) -> None:
    """Have the sidecars watch the ranks of `comm`; collective. `recording` is None if it was not created."""
    address = None
    if recording is not None:
        put_state(recording, watched.limits)
        address = attend(recording.path, f"rank {recording.rank}", watched=True)
    addresses = comm.allgather(address)
    if recording is not None:
        introduce_hosts(recording.path, recording.rank, dict(enumerate(addresses)))


def put_state(recording: Recording, limits: HangLimits) -> None:
    """Write the limits of waits to a record. From now on, `expected_late` also writes to it."""
    live.put_limits(recording, limits)
    live.put_late(recording, len(_late))
    _recordings.append(recording)


def _record(library: Any, channel: int, recording: Recording | None) -> None:
    """Have the engine record the operations of a channel."""
    if recording is not None:
        # The engine writes to it until MPI is finalized, after Python has shut down.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(recording.memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(recording.memory))
        library.commplan_channel_watch(channel, address)


class RequestWatch(NamedTuple):
    """The watched channel of workers and servers.

    Attributes:
        recording: The record of this rank; None if it could not be created.
    """

    recording: Recording | None

    @classmethod
    def begin(cls, library: Any, channel: int, watched: Watched, comm: Any, workers: int) -> Self:
        """Watch a channel of workers and servers. All ranks of `comm` must call this together.

        The engine records the requests of workers; servers write their own records.

        Args:
            library: The engine.
            channel: The engine's handle of the channel.
            watched: The settings.
            comm: The communicator of the channel.
            workers: The number of workers, which are the first ranks of `comm`.
        """
        rank = int(comm.Get_rank())
        lane = "requests" if rank < workers else "server"
        recording = start_recording(watched.job, watched.plan, rank, int(comm.Get_size()), lane=lane)
        _watch(recording, watched, comm)
        _record(library, channel, recording)  # on a server the engine only reads the verdict
        return cls(recording)

    def serve(self, *, waits: bool, patient: bool, moved: bool) -> None:
        """Report the state of a server. A server that has not reported for a second counts as busy.

        Args:
            waits: Whether some worker waits for another worker.
            patient: Whether the server has its own timeout for such a wait.
            moved: Whether anything has arrived since the last report.
        """
        if self.recording is not None:
            live.put_served(self.recording, waits=waits, patient=patient, moved=moved)

    def verdict(self) -> live.WrittenVerdict | None:
        """The verdict on the rank that blocks the others; None if there is no verdict yet."""
        return live.verdict_of(self.recording) if self.recording is not None else None


def forget(recording: Recording) -> None:
    """Delete a record after its run has ended successfully on all ranks.

    Args:
        recording: A record of `start` or `RequestWatch.begin`. The engine must have released its channel:
            it writes to the record until then.
    """
    unwatch(recording.path)
    _recordings.remove(recording)
    recording.remove()
    atexit.unregister(recording.remove)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(recording.memory))


@contextmanager
def expected_late() -> Generator[None]:
    """A context in which the sidecar expects this process to join the others late. It may be nested."""
    _late.append(None)
    try:
        _put_late()
        yield
    finally:
        _late.pop()
        _put_late()


def _put_late() -> None:
    for recording in _recordings:
        live.put_late(recording, len(_late))


def main_stack() -> str:
    """The user's stack in the main thread, innermost frame first, and the current long activity, as text.

    Each part is omitted if it is empty.
    """
    return "; ".join(filter(None, (shown(own_frames()), activity())))
