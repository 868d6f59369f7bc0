"""`Team`: the processes that share rows, as ranks of a communicator.

The speaker of a host is its first process in the team. It exchanges rows and last messages with the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from commplan.input.work_partition import HostTransfer
from commplan.lowering.mpi.instructions import RECEIVE, SEND, Instructions
from commplan.lowering.mpi.job.rendezvous import highest_tag
from commplan.lowering.mpi.lists import PollIntervals, Runner, Settings
from commplan.runtime.input.transport.transfer_plan import Form, transfer_list

# 64 pending messages keep a link busy while this thread waits for a core, which decoding occupies for whole
# time slices. A synchronous send leaves nothing in a local queue that only later calls of MPI would empty.
_SETTINGS = Settings(window=64, label=1, synchronous=True)
# Messages that arrive during a sleep wait in buffers. A longer sleep costs 5% of a batch and saves no CPU
# time.
_INTERVALS = PollIntervals(spin=0, shortest=500_000, longest=1_500_000, bulk=500_000)
_LISTS = 16  # maximum number of cached lists: batches have two lengths, and regroupings are few
_DELIVERY_S = 0.2  # maximum wait in seconds for the delivery of a last message
_LAST_NBYTES = 512  # maximum bytes of a last message

_open: list[Team] = []  # teams that this process has left and others have not, with pending last messages


def goes_on() -> bool:
    """Whether this MPI survives dead processes (ULFM), as `mpirun --with-ft ulfm` enables in Open MPI."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")  # noqa: SIM112  Open MPI's name


def progress() -> None:
    """Let MPI process incoming messages: it does so only inside of calls."""
    MPI.COMM_SELF.Iprobe()


class Transfers(NamedTuple):
    """The messages of this host in one batch.

    Attributes:
        number: the number of the list in the engine; None if this host has no messages.
        sent: the bytes that this host sends.
        received: the bytes that this host receives.
    """

    number: int | None
    sent: int
    received: int


class Team:
    """A communicator and the hosts of its ranks. All its processes make one with equal arguments.

    Attributes:
        comm: the communicator.
        processes: the process of each rank.
        speakers: the speaker of each host, a process.
        ranks: the rank of each host's speaker.
        has_reported: whether this host has sent its last message.

    Args:
        comm: an mpi4py communicator that nothing else uses. It is freed after all processes have left.
        processes: the process of each rank.
        hosts: the host of every process, including dead ones.
    """

    def __init__(self, comm: Any, processes: Sequence[int], hosts: Sequence[int]) -> None:
        self.comm, self.processes = comm, tuple(processes)
        self.speakers: dict[int, int] = {}
        for process in self.processes:
            self.speakers.setdefault(hosts[process], process)
        ranks = {process: rank for rank, process in enumerate(self.processes)}
        self.ranks = {host: ranks[process] for host, process in self.speakers.items()}
        # The tag of last messages. Lists use lower tags. The engine's leave messages have this one, but the
        # channel of a runner sends none.
        self._last_tag = highest_tag()
        self._runner: Runner | None = None
        self._transfers: dict[tuple[tuple[HostTransfer, ...], tuple[Form, ...]], Transfers] = {}
        self._rank = int(comm.Get_rank())
        self._reports: dict[int, str] = {}  # see `reports`
        self._sends: list[Any] = []  # requests of this host's last message that are not complete
        self.has_reported = False
        # The pending receive of each other speaker's last message: the request and the buffer.
        self._receives: dict[int, tuple[Any, Any]] = {}
        for host in self.others if self.speaks else ():
            buffer = np.zeros(_LAST_NBYTES, np.uint8)
            self._receives[host] = comm.Irecv([buffer, MPI.BYTE], self.ranks[host], self._last_tag), buffer

    @property
    def others(self) -> list[int]:
        """The hosts whose speaker is not this process."""
        return [host for host, rank in self.ranks.items() if rank != self._rank]

    @property
    def speaks(self) -> bool:
        """Whether this process is the speaker of its host."""
        return self._rank in self.ranks.values()

    # --- messages between speakers ---

    def transfers(self, moves: tuple[HostTransfer, ...], host: int, forms: tuple[Form, ...]) -> Transfers:
        """The messages and copies of this host for some collectives, made on the first call.

        Args:
            moves: the collectives.
            host: the host of this process.
            forms: the arrays of the slot.

        Raises:
            CommplanError: CP0830 if the engine is not available.
        """
        if (moves, forms) not in self._transfers:
            if len(self._transfers) == _LISTS:
                oldest = self._transfers.pop(next(iter(self._transfers)))
                if oldest.number is not None:
                    self.runner.drop(oldest.number)
            program = transfer_list(moves, host, forms)
            ranks = [self.ranks[peer] for peer in program.peers]
            number = self.runner.add(program, ranks, _SETTINGS) if program.code else None
            self._transfers[moves, forms] = Transfers(
                number, _nbytes(program, SEND), _nbytes(program, RECEIVE)
            )
        return self._transfers[moves, forms]

    @property
    def runner(self) -> Runner:
        """Runs lists between the speakers. Raises CP0830 if the engine is not available."""
        if self._runner is None:
            self._runner = Runner(self.comm, _INTERVALS)
        return self._runner

    def close(self) -> None:
        """Close the runner. Transfers are impossible afterwards; last messages are not."""
        self._transfers.clear()
        if self._runner is not None:
            self._runner.close()

    def rank_in_world(self, process: int) -> int:
        """The rank of a process as mpirun counts them."""
        rank = self.processes.index(process)
        return int(self.comm.Get_group().Translate_ranks([rank], MPI.COMM_WORLD.Get_group())[0])

    # --- deaths ---

    def dead(self) -> list[int]:
        """The processes known to have died; none if MPI does not report deaths."""
        if not goes_on():
            return []
        progress()
        failed = self.comm.Get_failed()
        ranks: list[int] = failed.Translate_ranks(range(failed.Get_size()), self.comm.Get_group())
        return sorted(self.processes[rank] for rank in ranks)

    def silenced(self) -> bool:
        """Whether a speaker has died."""
        return bool(set(self.dead()) & set(self.speakers.values()))

    def revoked(self) -> bool:
        """Whether a process has revoked the communicator."""
        progress()
        return bool(self.comm.Is_revoked())

    def revoke(self) -> None:
        """Make every call on the communicator fail, in all processes. Has no effect without ULFM."""
        if goes_on() and not self.comm.Is_revoked():
            self.comm.Revoke()

    # --- the end ---

    def reports(self) -> dict[int, str]:
        """The last messages of other hosts that have arrived, by host; empty texts after a normal end."""
        for host, (request, buffer) in list(self._receives.items()):
            if request.Test():
                del self._receives[host]
                self._reports[host] = buffer.tobytes().rstrip(b"\0").decode(errors="replace")
        return self._reports

    def tell(self, last: str) -> None:
        """Send the last message of this host to all others. Only the first call of the speaker does so."""
        if self.speaks and not self.has_reported:
            self.has_reported = True
            data = np.frombuffer(last.encode()[:_LAST_NBYTES].ljust(1, b"\0"), np.uint8)
            for host in self.others:
                self._sends.append(self.comm.Issend([data, MPI.BYTE], self.ranks[host], self._last_tag))

    def leave(self, cause: str = "") -> None:
        """Leave the team, and report a failure to the others.

        The communicator is freed after all have left: otherwise a later communicator with the same number
        would receive their last messages.

        Args:
            cause: the code and the message of the failure; empty after a normal end.
        """
        self.close()
        try:
            if self.speaks:
                self.tell(cause)
                deadline_s = time.monotonic() + _DELIVERY_S
                while not self.ended() and time.monotonic() < deadline_s:
                    time.sleep(1e-3)
        except MPI.Exception:
            return  # the communicator has lost a process: it is not freed
        _open.append(self)
        free_closed()

    def ended(self) -> bool:
        """Whether all other speakers have left and have received this host's last message.

        Raises:
            MPI.Exception: If a message has failed, because a process has died.
        """
        self._sends = [request for request in self._sends if not _ended(request)]
        return not self._sends and len(self.reports()) == len(self.others)


def free_closed() -> None:
    """Free the communicators of the teams that this process has left.

    That of a team whose speaker this process was is freed once all other speakers have left, too.
    """
    for team in list(_open):
        try:
            if not team.speaks or team.ended():
                team.comm.Free()
                _open.remove(team)
        except MPI.Exception:
            _open.remove(team)


def _ended(send: Any) -> bool:
    """Whether a send is complete. Raises `MPI.Exception` if it failed.

    Uses `Get_status`, which does not free a failed request, unlike `Test`. Open MPI ends the job when it
    reports the failure a second time.
    """
    status = MPI.Status()
    if not send.Get_status(status):
        return False
    if status.Get_error() != MPI.SUCCESS:
        raise MPI.Exception(status.Get_error())
    send.Test()
    return True


def _nbytes(program: Instructions, kind: int) -> int:
    """The bytes of all instructions of a kind."""
    return sum(row.nbytes for row in program.code if row.kind == kind)
