"""Finds a step that one rank compares while another rank runs it, by messages while a comparison waits.

A thread of each rank answers, because the main thread may wait in a collective. The first rank that finds
such a step sends the error to all others. Ranks that have ended, have died or are stopped are found by the
sidecars, from the records.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

from mpi4py import MPI

from commplan.diagnostics import CommplanError, Diagnostic, fail
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.job.rendezvous import highest_tag
from commplan.recorder import live
from commplan.recorder.stacks import user_line
from commplan.runtime.observe.abort_hook import common, end_job
from commplan.runtime.observe.joint_calls import SETTLE_S, JointCalls, JointReport

_TICK_S = 0.1
_END_S = 10.0  # Seconds for the listener to end before MPI does.


class RankCalls(JointCalls):
    """The joint calls of ranks of a run.

    Args:
        comm: A communicator of the run, not of the program.
        ranks: The ranks of `comm` that make the calls.
        channel: The channel of their collectives.
        group: The axes along which they lie, see `recorder.live.comparing`.
    """

    def __init__(self, comm: Any, ranks: tuple[int, ...], channel: Channel, group: int) -> None:
        super().__init__()
        self._comm, self._channel, self._group = comm, channel, group
        self._other_ranks = [rank for rank in ranks if rank != comm.Get_rank()]
        self._tag = highest_tag() - 1 - group  # Distinct from those of other ranks that share `comm`.
        self._comparisons = 0
        self._verdict: Diagnostic | None = None
        self._asked_at = 0.0
        self._answers: dict[int, JointReport] = {}  # By rank, since the last query.
        self._sends: list[Any] = []
        self._sending = threading.Lock()  # The main thread and the listener both send.
        _listener().add(self)

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        self._comparisons += 1
        with super().waiting(), live.comparing(self._channel.recording, self._comparisons, self._group):
            yield

    def look(self, waited: float) -> None:
        """Called repeatedly while a comparison waits.

        Raises:
            CommplanError: CP0854 if another rank runs the step, CP0834 for the verdict of the sidecar.
        """
        now, recording = time.monotonic(), self._channel.recording
        if recording is not None and (text := live.verdict_of(recording)):
            waits = f"the comparison of a step, called at {user_line() or 'an unknown line'}, waits for it"
            fail("CP0834", *(line.removeprefix("note: ") for line in text.splitlines()), waits)
        if self._verdict is not None:
            raise _common(self._verdict)
        if waited < SETTLE_S or now < self._asked_at + SETTLE_S:
            return
        answers, self._answers = self._answers, {}
        if (diagnostic := self.disagreement(dict(answers))) is not None:  # The listener may still add one.
            self._send("verdict", diagnostic, self._other_ranks)
            time.sleep(SETTLE_S / 2)  # The others print the error before this rank ends.
            raise _common(diagnostic)
        self._asked_at = now
        self._send("ask", None, self._other_ranks)

    def answer(self) -> None:
        """Handle the messages that have arrived."""
        status = MPI.Status()
        while (message := self._comm.improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
            source, (kind, content) = int(status.Get_source()), message.recv()
            if kind == "ask":
                report = self.report(waits=self.is_inside or self._channel.is_busy())
                self._send("answer", report, [source])
            elif kind == "answer":
                self._answers[source] = content
            elif self._verdict is None:
                self._verdict = content
                if self.comparison is None:  # This rank waits in a collective.
                    print(CommplanError(content), file=sys.stderr, flush=True)
                    time.sleep(SETTLE_S)
                    end_job(1)

    def _send(self, kind: str, content: Any, ranks: list[int]) -> None:
        with self._sending:
            self._sends = [send for send in self._sends if not send.Test()]
            self._sends += [self._comm.isend((kind, content), rank, self._tag) for rank in ranks]


def _common(diagnostic: Diagnostic) -> CommplanError:
    """The error that all ranks raise, which the first one prints in full."""
    error = CommplanError(diagnostic)
    common(error)
    return error


class _Listener:
    """The thread of this process that answers other ranks. It ends before MPI does."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[RankCalls] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commplan-steps", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        # A program may call MPI.Finalize itself. MPI first deletes the attributes of COMM_SELF.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=self._end), None)

    def add(self, calls: RankCalls) -> None:
        with self._lock:
            self._calls.add(calls)

    def _end(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._answer()

    def _answer(self) -> None:  # a function, so that the thread holds no call between two ticks
        with self._lock:
            every = tuple(self._calls)
        for calls in every:
            with contextlib.suppress(MPI.Exception):  # A rank may have died.
                calls.answer()


_listeners: list[_Listener] = []


def _listener() -> _Listener:
    if not _listeners:
        _listeners.append(_Listener())
    return _listeners[0]
