"""Calls of MPI that wait for other ranks, and end with an error on all of them where one does not come."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.lowering.mpi.job.engine_errors import TOLD
from commplan.lowering.mpi.typing_shim import MPI
from commplan.recorder.processes import process_state
from commplan.sidecar import leave
from commplan.wait import TIMEOUT_S, Wait, apart, is_bound, until

_GRACE_S, _LOOK_S, _SETTLE_S = 3.0, 0.02, 0.5
_SHOWN = 4  # ranks that an error describes
_Result = TypeVar("_Result")
_sent: list[Any] = []  # to ranks that may never receive it: what is sent must stay
_abandoned: list[bool] = []


class Presence(NamedTuple):
    """What a rank says once one has waited for too long. purpose: what it came to do. processes: of this job
    on its host, by rank as mpirun counts them. verdict: the diagnostic that all raise, if there is one."""

    purpose: str
    host: str
    processes: dict[int, tuple[int, str]]
    verdict: tuple[str, list[str]] | None = None


class Rendezvous:
    """Makes the same blocking calls on every rank of `ranks`, each within `timeout_s` seconds.

    comm: an mpi4py communicator; messages go over it under its highest tag, none before a call is late.
    purpose: what the ranks come to do, such as "bind plan `train`". ranks: by default all of `comm`. option:
    what a user writes to have them wait longer. A process that gives up on a call can use MPI no longer: at
    its exit it ends the job.
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
    ) -> None:
        self.comm, self.purpose, self.option, self.file = comm, purpose, option, file
        self.timeout_s = timeout_s if is_bound(timeout_s) else TIMEOUT_S  # others are told so later
        self.ranks = range(comm.Get_size()) if ranks is None else ranks
        self.moved, self._tag = 0.0, highest_tag()
        self._present: dict[int, Presence] = {}

    def among(self, ranks: Sequence[int]) -> Rendezvous:
        """The same for some of the ranks."""
        return Rendezvous(
            self.comm, self.purpose, self.timeout_s, ranks=ranks, option=self.option, file=self.file
        )

    def __call__(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """`call(*arguments)`, which runs in a thread of its own. Raises CP0849 where a rank does not come.

        A call that sets `moved` to the time, from `time.monotonic()`, may take as long again.
        """
        if len(self.ranks) == 1:
            return call(*arguments)
        self.moved, ended = time.monotonic(), list[bool]()

        def run() -> _Result:
            try:
                return call(*arguments)
            finally:
                ended.append(True)

        try:
            return apart(run, Wait(inf, self._late, self._look))
        except BaseException:
            if not ended and not _abandoned:
                _abandoned.append(True)
                atexit.register(_end_job)
            raise

    def _look(self, waited: float) -> None:
        del waited
        self._listen()
        idle = time.monotonic() - self.moved
        if idle > self.timeout_s:
            self._late(idle)
        if self._present:
            self._tell()

    def _listen(self) -> None:
        """Raises what another rank has found."""
        status = MPI.Status()
        while (message := self.comm.improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
            presence: Presence = message.recv()
            self._present[int(status.Get_source())] = presence
            if presence.verdict is not None:
                self._refuse(*presence.verdict)

    def _tell(self, verdict: tuple[str, list[str]] | None = None) -> list[Any]:
        """Sends this rank's presence to all others, once, and a verdict."""
        me = int(self.comm.Get_rank())
        if me in self._present and verdict is None:
            return []
        host = socket.gethostname()
        mine = self._present[me] = Presence(self.purpose, host, _processes(), verdict)
        sends = [self.comm.issend(mine, rank, self._tag) for rank in self.ranks if rank != me]
        _sent.extend(sends)
        return sends

    def _late(self, waited: float) -> NoReturn:
        """Asks who is there, and tells them who is not."""
        self._tell()

        def gathered(seconds: float) -> bool:
            time.sleep(seconds)
            self._listen()
            return len(self._present) >= len(self.ranks)

        def judge(over: float) -> NoReturn:
            del over
            self._judge(waited)

        until(gathered, Wait(_GRACE_S, judge, slice_s=_LOOK_S))
        self._judge(waited)

    def _judge(self, waited: float) -> NoReturn:
        missing = {rank: self._process(rank) for rank in self.ranks if rank not in self._present}
        down = {rank: process for rank, process in missing.items() if process[1] not in ("alive", "unknown")}
        if missing:
            blamed = down or missing  # who lives may be through already
            message = f"{_named([*blamed])} not come to {self.purpose} within {waited:.0f} s"
            notes = [f"rank {rank} {text}" for rank, (text, _) in list(blamed.items())[:_SHOWN]]
        else:
            message = f"all ranks have come, and nothing has moved for {waited:.0f} s"
            notes = [f"rank {n} has come to {self._present[n].purpose}" for n in self.ranks[:_SHOWN]]
        sends = self._tell((message, notes))

        def refuse(over: float) -> NoReturn:
            del over
            self._refuse(message, notes)

        until(
            lambda seconds: time.sleep(seconds) or MPI.Request.Testall(sends),
            Wait(_SETTLE_S, refuse, slice_s=_LOOK_S),
        )
        self._refuse(message, notes)

    def _process(self, rank: int) -> tuple[str, str]:
        """What is said of the process of a rank that has not come, and its state."""
        known = self.comm.Get_group().Translate_ranks([rank], MPI.COMM_WORLD.Get_group())[0]
        for presence in self._present.values():
            if known in presence.processes:
                number, state = presence.processes[known]
                return f"(process {number} on {presence.host}) is {state}", state
        hosts = ", ".join(sorted({presence.host for presence in self._present.values()})[:_SHOWN])
        return f"has no process on the hosts of those that came: {hosts}", "unknown"

    def _refuse(self, message: str, notes: Sequence[str]) -> NoReturn:
        fix = (f"{self.option} waits longer",) if self.option else ()
        error = CommplanError(
            Diagnostic("CP0849", message, None, tuple(map(Note, (*notes, *fix))), file=self.file)
        )
        setattr(error, TOLD, True)
        raise error


@functools.cache
def highest_tag() -> int:
    """Of every communicator. Not asked of one that another thread duplicates: Open MPI then knows of none."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} have"


def _processes() -> dict[int, tuple[int, str]]:
    """The processes of this job on this host and their states, by rank in COMM_WORLD, where the launcher
    gives its processes the variables of PMIx, as Open MPI's does."""
    job, processes = os.environ.get("PMIX_NAMESPACE", ""), dict[int, tuple[int, str]]()
    numbers = sorted(int(place.name) for place in Path("/proc").glob("[0-9]*")) if job else []
    for number in numbers:
        try:
            environment = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace")
            pairs = dict(entry.split("=", 1) for entry in environment.split("\0") if "=" in entry)
            if pairs.get("PMIX_NAMESPACE") != job or "libmpi" not in Path(f"/proc/{number}/maps").read_text():
                continue
        except OSError:  # of another user, or it has ended
            continue
        processes.setdefault(int(pairs["PMIX_RANK"]), (number, process_state(number)))
    return processes


def _end_job() -> None:
    """Another thread is in a call of MPI that does not return, so MPI cannot be finalized."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(_SETTLE_S)  # the others have been told, and say so
    leave(aborts=True)
    MPI.COMM_WORLD.Abort(1)
