"""Runs blocking MPI calls with a timeout: if a rank does not join, all ranks raise the same error."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from mpi4py import MPI

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.lowering.mpi.job.engine_errors import IS_REPORTED
from commplan.recorder.notice import Notice
from commplan.recorder.processes import process_state
from commplan.sidecar import leave
from commplan.wait import TIMEOUT_S, Wait, is_timeout, run_in_thread

_ANSWER_S = 3.0  # seconds to wait for the answers of other ranks after a timeout
_ARRIVALS_S = 1.0  # seconds to wait for the arrivals of other ranks before a notice
_CHECK_S = 0.02  # seconds between two checks for messages
_SETTLE_S = 0.5  # seconds to send the error to other ranks, and for them to report it
_SHOWN = 4  # ranks that an error describes
_LISTED = 8  # ranks that an error lists
_Result = TypeVar("_Result")
_sent: list[Any] = []  # keeps sends alive whose receiver may have died
_abandoned: list[bool] = []  # non-empty once a call was abandoned


class Presence(NamedTuple):
    """The answer of a rank after a timeout.

    Attributes:
        purpose: The purpose of the call that the rank has joined.
        host: The host of the rank.
        processes: The processes of this job on its host: PID and state by rank in COMM_WORLD.
        verdict: The message and notes of the error that all ranks raise; None until one rank has decided.
    """

    purpose: str
    host: str
    processes: dict[int, tuple[int, str]]
    verdict: tuple[str, list[str]] | None = None


class Arrival(NamedTuple):
    """A message that a rank has joined a call.

    A rank sends it if it has waited for long, or if it receives the message of another rank.

    Attributes:
        purpose: The purpose of the call that the rank has joined.
        number: The number of the call among those of its rendezvous, from 1.
    """

    purpose: str
    number: int


class Rendezvous:
    """Runs the same blocking calls on every rank of `ranks`, each with a timeout.

    After a timeout the abandoned call still blocks a thread, so MPI can no longer be finalized: the process
    aborts the job at exit.

    Args:
        comm: An mpi4py communicator. Its highest tag is used for messages about late ranks.
        purpose: A description for errors, such as "bind plan `train`".
        timeout_s: Seconds without progress until a call is late. If it is invalid, the default is used.
        ranks: The ranks that join; None for all of `comm`.
        option: The option that extends the timeout, for errors; empty if there is none.
        file: The plan's file, for errors.
        notice: Printed once, by the lowest rank that has joined a call, if others are late; None prints
            nothing.

    Attributes:
        last_progress_s: The time of the last progress, as of `time.monotonic()`.
    """

    def __init__(
        self,
        comm: Any,
        purpose: str,
        timeout_s: float = TIMEOUT_S,
        *,
        ranks: Sequence[int] | None = None,
        option: str = "",
        file: str = "",
        notice: Notice | None = None,
    ) -> None:
        self.comm, self.purpose, self.option, self.file, self.notice = comm, purpose, option, file, notice
        # A rank whose timeout is invalid still joins, and raises later.
        self.timeout_s = timeout_s if is_timeout(timeout_s) else TIMEOUT_S
        self.ranks = range(comm.Get_size()) if ranks is None else ranks
        self.last_progress_s = 0.0
        self._tag = highest_tag()
        self._present: dict[int, Presence] = {}  # the answers after a timeout, by rank
        self._call, self._is_announced = Arrival(purpose, 0), False
        self._arrivals: dict[int, Arrival] = {}  # the last one of each rank

    def among(self, ranks: Sequence[int]) -> Rendezvous:
        """A rendezvous of some of the ranks with the same settings."""
        return Rendezvous(
            self.comm, self.purpose, self.timeout_s,
            ranks=ranks, option=self.option, file=self.file, notice=self.notice,
        )  # fmt: skip

    def __call__(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run `call(*arguments)` in a separate thread, or directly if there is only one rank.

        A call that makes progress may set `last_progress_s` to `time.monotonic()`: this restarts the timeout.

        Returns:
            The result of the call.

        Raises:
            CommplanError: CP0849 if a rank does not join. Exceptions of the call are raised unchanged.
        """
        if len(self.ranks) == 1:
            return call(*arguments)
        self.last_progress_s = time.monotonic()
        self._call, self._is_announced = self._call._replace(number=self._call.number + 1), False
        with contextlib.suppress(MPI.Exception):  # a rank may have died that this call does not need
            self._receive()  # also what was sent while an earlier call ended
        ended: list[bool] = []

        def run() -> _Result:
            try:
                return call(*arguments)
            finally:
                ended.append(True)

        try:
            return run_in_thread(run, Wait(inf, self._on_timeout, self._check))
        except BaseException:
            if not ended and not _abandoned:
                _abandoned.append(True)
                atexit.register(_end_job)
            raise

    def _check(self, _: float) -> None:
        """Receive messages; raise after a timeout, and answer a rank that has had one."""
        self._receive()
        idle = time.monotonic() - self.last_progress_s
        if idle > self.timeout_s:
            self._on_timeout(idle)
        if self._present:
            self._answer()
        if self._arrived():
            self._announce()
        if self.notice is not None:
            self.notice.poll(idle, self._missing)

    def _arrived(self) -> list[int]:
        """The other ranks whose message that they have joined this call has been received."""
        return [rank for rank in self.ranks if self._arrivals.get(rank) == self._call]

    def _announce(self) -> None:
        """Report to all other ranks that this rank has joined the call, once."""
        own_rank = int(self.comm.Get_rank())
        if not self._is_announced:
            self._is_announced = True
            _sent.extend(self.comm.isend(self._call, n, self._tag) for n in self.ranks if n != own_rank)

    def _missing(self) -> list[int]:
        """The ranks that have not joined the call; empty unless this is the lowest rank that has joined."""
        self._announce()
        deadline = time.monotonic() + _ARRIVALS_S
        while len(self._arrived()) < len(self.ranks) - 1 and time.monotonic() < deadline:
            time.sleep(_CHECK_S)
            self._receive()
        arrivals = {int(self.comm.Get_rank()), *self._arrived()}
        is_first = int(self.comm.Get_rank()) == min(arrivals)
        return [rank for rank in self.ranks if rank not in arrivals] if is_first else []

    def _receive(self) -> None:
        """Receive the messages of other ranks. Raises if one contains a verdict."""
        status = MPI.Status()
        while (message := self.comm.improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
            received: Presence | Arrival = message.recv()
            rank = int(status.Get_source())
            if isinstance(received, Arrival):
                self._arrivals[rank] = received
                continue
            self._present[rank] = received
            if received.verdict is not None:
                self._fail(*received.verdict)

    def _answer(self, verdict: tuple[str, list[str]] | None = None) -> list[Any]:
        """Send this rank's answer to all other ranks, once; or the verdict.

        Returns the MPI requests of the sends.
        """
        own_rank = int(self.comm.Get_rank())
        if own_rank in self._present and verdict is None:
            return []
        presence = Presence(self.purpose, socket.gethostname(), _processes(), verdict)
        self._present[own_rank] = presence
        sends = [self.comm.issend(presence, rank, self._tag) for rank in self.ranks if rank != own_rank]
        _sent.extend(sends)
        return sends

    def _on_timeout(self, waited: float) -> NoReturn:
        """Collect answers for `_ANSWER_S`, then raise an error that names the missing ranks."""
        self._answer()
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(_CHECK_S)
            self._receive()
            if len(self._present) >= len(self.ranks):
                break
        self._judge(waited)

    def _judge(self, waited: float) -> NoReturn:
        """Decide which ranks are missing, send the decision to all ranks and raise it."""
        missing = {rank: self._process(rank) for rank in self.ranks if rank not in self._present}
        dead = {rank: process for rank, process in missing.items() if process[1] not in ("alive", "unknown")}
        if missing:
            blamed = dead or missing  # a living rank may have left the call already
            message = f"{_ranks_have([*blamed])} not joined the call to {self.purpose} within {waited:.0f} s"
            notes = [f"rank {rank} {text}" for rank, (text, _) in list(blamed.items())[:_SHOWN]]
        else:
            message = f"all ranks have joined the call, and have made no progress for {waited:.0f} s"
            notes = [
                f"rank {n} has joined the call to {self._present[n].purpose}" for n in self.ranks[:_SHOWN]
            ]
        sends = self._answer((message, notes))
        deadline = time.monotonic() + _SETTLE_S
        while not MPI.Request.Testall(sends) and time.monotonic() < deadline:
            time.sleep(_CHECK_S)
        self._fail(message, notes)

    def _process(self, rank: int) -> tuple[str, str]:
        """A description of the process of a missing rank, and its state."""
        world_rank = self.comm.Get_group().Translate_ranks([rank], MPI.COMM_WORLD.Get_group())[0]
        for presence in self._present.values():
            if world_rank in presence.processes:
                pid, state = presence.processes[world_rank]
                return f"(process {pid} on {presence.host}) is {state}", state
        hosts = ", ".join(sorted({presence.host for presence in self._present.values()})[:_SHOWN])
        return f"has no process on the hosts of the other ranks: {hosts}", "unknown"

    def _fail(self, message: str, notes: Sequence[str]) -> NoReturn:
        """Raise CP0849, marked as an error that all ranks raise."""
        fix = (f"{self.option} waits longer",) if self.option else ()
        error = CommplanError(
            Diagnostic("CP0849", message, None, tuple(map(Note, (*notes, *fix))), file=self.file)
        )
        setattr(error, IS_REPORTED, True)
        raise error


@functools.cache
def highest_tag() -> int:
    """The highest tag of every communicator.

    Open MPI does not return it for a communicator that another thread is duplicating.
    """
    return int(cast("Any", MPI.COMM_WORLD).Get_attr(MPI.TAG_UB))


def _ranks_have(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:_LISTED]))}{more} have"


def _processes() -> dict[int, tuple[int, str]]:
    """The processes of this job on this host: PID and state by rank in COMM_WORLD.

    Empty unless the launcher sets the environment variables of PMIx, as Open MPI's does.
    """
    job = os.environ.get("PMIX_NAMESPACE", "")
    processes: dict[int, tuple[int, str]] = {}
    pids = sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*")) if job else []
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            pairs = dict(entry.split("=", 1) for entry in environment.split("\0") if "=" in entry)
            if pairs.get("PMIX_NAMESPACE") != job or "libmpi" not in Path(f"/proc/{pid}/maps").read_text():
                continue
        except OSError:  # the process belongs to another user, or has ended
            continue
        processes.setdefault(int(pairs["PMIX_RANK"]), (pid, process_state(pid)))
    return processes


def _end_job() -> None:
    """Abort the job, since another thread is blocked in MPI and MPI cannot be finalized."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(_SETTLE_S)  # gives the other ranks time to report the error
    leave(aborts=True)
    MPI.COMM_WORLD.Abort(1)
