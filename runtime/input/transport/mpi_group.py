"""The processes that share, as ranks of a communicator: speakers of hosts, dead processes, departed hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from commplan.input.work_partition import HostTransfer
from commplan.lowering.mpi.instructions import RECEIVE, SEND, Instructions
from commplan.lowering.mpi.lists import PollIntervals, Runner, Settings
from commplan.runtime.input.transport.transfer_plan import Form, transfer_list

_LEFT = 0  # a tag that lists do not use
# Enough pending messages to keep a link busy while this thread waits for a core, which decoding takes from it
# for whole time slices. A synchronous send leaves nothing in a local queue that only later calls of MPI would
# empty.
_SETTINGS = Settings(window=64, label=1, synchronous=True)
# Messages that arrive during a sleep wait in buffers. A longer sleep costs 5% of a batch and saves no CPU
# time.
_INTERVALS = PollIntervals(spin=0, shortest=500_000, longest=1_500_000, bulk=500_000)
_LISTS = 16  # cached lists: batches have two lengths, and regroupings are few
_GOODBYE_S = 0.2  # seconds that the delivery of a last message may take
_WORD = 512  # bytes of a last message, at most

_open: list[Team] = []  # teams that this process has left and others have not: last messages are still due


def goes_on() -> bool:
    """Whether this MPI survives dead processes (ULFM), as `mpirun --with-ft ulfm` enables in Open MPI."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")  # noqa: SIM112  Open MPI's name


def progress() -> None:
    """Let MPI process incoming messages: it does so only inside of calls."""
    MPI.COMM_SELF.Iprobe()


class Transfers(NamedTuple):
    """The work of this host in one batch.

    Attributes:
        number: the number of the list in the engine; None if this host has no work.
        sent, received: the bytes that this host sends and receives.
    """

    number: int | None
    sent: int
    received: int


class Team:
    """A communicator and the hosts of its ranks.

    Args:
        comm: a communicator that nothing else uses.
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
        self._runner: Runner | None = None
        self._transfers: dict[tuple[tuple[HostTransfer, ...], tuple[Form, ...]], Transfers] = {}
        self._me = int(comm.Get_rank())
        self._reports: dict[int, str] = {}
        self._farewells: list[Any] = []
        self.has_reported = False  # this host has sent its last message
        self._mail: dict[int, tuple[Any, Any]] = {}  # the pending last message of each other speaker
        for host in self.others if self.speaks else ():
            word = np.zeros(_WORD, np.uint8)
            self._mail[host] = comm.Irecv([word, MPI.BYTE], self.ranks[host], _LEFT), word

    @property
    def others(self) -> list[int]:
        """The hosts of the other speakers."""
        return [host for host, rank in self.ranks.items() if rank != self._me]

    @property
    def speaks(self) -> bool:
        """Whether this process is the speaker of its host."""
        return self._me in self.ranks.values()

    # --- messages between speakers ---

    def transfers(self, moves: tuple[HostTransfer, ...], host: int, forms: tuple[Form, ...]) -> Transfers:
        """The messages and copies of `host`, this process's host, for `moves` on a slot of `forms`."""
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
        """Runs lists between the speakers."""
        if self._runner is None:
            self._runner = Runner(self.comm, _INTERVALS)
        return self._runner

    def close(self) -> None:
        """Close the runner of lists."""
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
        """Make every call on the communicator fail, in all processes."""
        if goes_on() and not self.comm.Is_revoked():
            self.comm.Revoke()

    # --- the end ---

    def reports(self) -> dict[int, str]:
        """The hosts that have left, each with the failure that it reported; empty after a normal end."""
        for host, (request, word) in list(self._mail.items()):
            if request.Test():
                del self._mail[host]
                self._reports[host] = word.tobytes().rstrip(b"\0").decode(errors="replace")
        return self._reports

    def tell(self, last: str) -> None:
        """Send the last message of this host to all others. Only the first one is sent."""
        if self.speaks and not self.has_reported:
            self.has_reported = True
            word = np.frombuffer(last.encode()[:_WORD].ljust(1, b"\0"), np.uint8)
            for host in self.others:
                self._farewells.append(self.comm.Issend([word, MPI.BYTE], self.ranks[host], _LEFT))

    def leave(self, cause: str = "") -> None:
        """Leave the team and report `cause` to the others. The communicator is freed after all have left:
        otherwise a later communicator with the same number would receive their last messages."""
        self.close()
        try:
            if self.speaks:
                self.tell(cause)
                until = time.monotonic() + _GOODBYE_S
                while not self.ended() and time.monotonic() < until:
                    time.sleep(1e-3)
        except MPI.Exception:
            return  # the communicator has lost a process: it is not freed
        _open.append(self)
        free_closed()

    def ended(self) -> bool:
        """Whether all other speakers have left and have received this host's last message."""
        self._farewells = [request for request in self._farewells if not _ended(request)]
        return not self._farewells and len(self.reports()) == len(self.others)


def free_closed() -> None:
    """Free the communicators of teams that every process has left."""
    for team in list(_open):
        try:
            if not team.speaks or team.ended():
                team.comm.Free()
                _open.remove(team)
        except MPI.Exception:
            _open.remove(team)


def _ended(send: Any) -> bool:
    """Whether a send is complete. Raises `MPI.Exception` if it failed.

    A failed request must not be freed, as every other call that tests it does: Open MPI ends the job when it
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
    return sum(row.nbytes for row in program.code if row.kind == kind)
