"""The processes that share, as ranks of a communicator: who speaks for which host, who has died, who has
left."""

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

_LEFT = 0  # a tag; lists have others
# Enough messages under way for a link to have work while this thread waits for a core, which decoding takes
# from it for whole time slices. A synchronous send leaves nothing in a queue here that only later calls of
# MPI would empty.
_SETTINGS = Settings(window=64, label=1, synchronous=True)
# What comes meanwhile waits in buffers. A longer sleep costs 5% of the time of a batch and saves no CPU time.
_INTERVALS = PollIntervals(spin=0, shortest=500_000, longest=1_500_000, bulk=500_000)
_LISTS = 16  # that are kept: there are two lengths of batches, and few regroupings
_GOODBYE_S = 0.2  # seconds that a last message may take to leave
_WORD = 512  # bytes of one, at most

_open: list[Team] = []  # closed here, and not yet by all others: their goodbyes are still to come


def goes_on() -> bool:
    """Whether this MPI outlives its dead (ULFM), as `mpirun --with-ft ulfm` asks of Open MPI."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")  # noqa: SIM112  Open MPI's name


def progress() -> None:
    """Let MPI look at what has come: it does nothing while nobody calls it."""
    MPI.COMM_SELF.Iprobe()


class Transfers(NamedTuple):
    """What this host does in one batch. number: of the list in the engine, None where it does nothing. sent,
    received: bytes."""

    number: int | None
    sent: int
    received: int


class Team:
    """comm: a communicator for this alone. processes: of each of its ranks. hosts: of every process there
    ever was."""

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
        self._gone: dict[int, str] = {}
        self._farewells: list[Any] = []
        self.told = False  # this host has said its last word
        self._mail: dict[int, tuple[Any, Any]] = {}  # of each other speaker its last word
        for host in self.others if self.speaks else ():
            word = np.zeros(_WORD, np.uint8)
            self._mail[host] = comm.Irecv([word, MPI.BYTE], self.ranks[host], _LEFT), word

    @property
    def others(self) -> list[int]:
        """The hosts of the other speakers."""
        return [host for host, rank in self.ranks.items() if rank != self._me]

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for its host."""
        return self._me in self.ranks.values()

    # --- messages between speakers ---

    def transfers(self, moves: tuple[HostTransfer, ...], host: int, forms: tuple[Form, ...]) -> Transfers:
        """What the speaker of `host`, this process, does to carry out `moves` on a slot of `forms`."""
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
        """Of lists between the speakers."""
        if self._runner is None:
            self._runner = Runner(self.comm, _INTERVALS)
        return self._runner

    def close(self) -> None:
        """Run no lists any more."""
        self._transfers.clear()
        if self._runner is not None:
            self._runner.close()

    def rank_in_world(self, process: int) -> int:
        """The rank of a process as mpirun counts them."""
        rank = self.processes.index(process)
        return int(self.comm.Get_group().Translate_ranks([rank], MPI.COMM_WORLD.Get_group())[0])

    # --- deaths ---

    def dead(self) -> list[int]:
        """The processes that are known to have died; none where MPI does not tell."""
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
        """Whether someone has revoked the communicator."""
        progress()
        return bool(self.comm.Is_revoked())

    def revoke(self) -> None:
        """Make every call on the communicator an error, here and everywhere."""
        if goes_on() and not self.comm.Is_revoked():
            self.comm.Revoke()

    # --- the end ---

    def gone(self) -> dict[int, str]:
        """The hosts that have left, each with what it said had failed: nothing where it left by itself."""
        for host, (request, word) in list(self._mail.items()):
            if request.Test():
                del self._mail[host]
                self._gone[host] = word.tobytes().rstrip(b"\0").decode(errors="replace")
        return self._gone

    def tell(self, last: str) -> None:
        """Send the last word of this host to all others; what comes after the first one is not sent."""
        if self.speaks and not self.told:
            self.told = True
            word = np.frombuffer(last.encode()[:_WORD].ljust(1, b"\0"), np.uint8)
            for host in self.others:
                self._farewells.append(self.comm.Issend([word, MPI.BYTE], self.ranks[host], _LEFT))

    def leave(self, cause: str = "") -> None:
        """Tell the others, and what has failed. The communicator is freed when all of them have left: else
        their last words would be read by the next one of its number."""
        self.close()
        try:
            if self.speaks:
                self.tell(cause)
                until = time.monotonic() + _GOODBYE_S
                while not self.ended() and time.monotonic() < until:
                    time.sleep(1e-3)
        except MPI.Exception:
            return  # of a communicator that has lost someone: it is left as it is
        _open.append(self)
        free_closed()

    def ended(self) -> bool:
        """Whether everyone has left, and knows that this process has."""
        self._farewells = [request for request in self._farewells if not _ended(request)]
        return not self._farewells and len(self.gone()) == len(self.others)


def free_closed() -> None:
    """Free the communicators of teams that all have left."""
    for team in list(_open):
        try:
            if not team.speaks or team.ended():
                team.comm.Free()
                _open.remove(team)
        except MPI.Exception:
            _open.remove(team)


def _ended(send: Any) -> bool:
    """Whether a send is over; raises `MPI.Exception` where it failed. Such a request must not be freed, as
    every other call that tests it does: Open MPI ends the job when it hears of the failure once more."""
    status = MPI.Status()
    if not send.Get_status(status):
        return False
    if status.Get_error() != MPI.SUCCESS:
        raise MPI.Exception(status.Get_error())
    send.Test()
    return True


def _nbytes(program: Instructions, kind: int) -> int:
    return sum(row.nbytes for row in program.code if row.kind == kind)
