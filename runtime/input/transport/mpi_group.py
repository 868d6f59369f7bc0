"""The processes that share, as ranks of a communicator: who speaks for which host, who has died, who has
left."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from commplan.lowering.mpi.typing_shim import MPI
from commplan.runtime.input.transport.mpi_executor import Endpoint, ended, forget

_LEFT = 0  # a tag
_GOODBYE_S = 0.2  # seconds that a last message may take to leave

_open: list[Team] = []  # closed here, and not yet by all others: their goodbyes are still to come


def goes_on() -> bool:
    """Whether this MPI outlives its dead (ULFM), as `mpirun --with-ft ulfm` asks of Open MPI."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")  # noqa: SIM112  Open MPI's name


def progress() -> None:
    """Let MPI look at what has come: it does nothing while nobody calls it."""
    MPI.COMM_SELF.Iprobe()


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
        self.wire = Endpoint(comm, self.ranks)
        self._me = int(comm.Get_rank())
        self._gone: list[int] = []
        self._farewells: list[Any] = []
        self._mail: dict[int, Any] = {}  # of each other speaker its last word
        for host in self.others if self.speaks else ():
            self._mail[host] = comm.Irecv([np.zeros(1, np.uint8), MPI.BYTE], self.ranks[host], _LEFT)

    @property
    def others(self) -> list[int]:
        """The hosts of the other speakers."""
        return [host for host, rank in self.ranks.items() if rank != self._me]

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for its host."""
        return self._me in self.ranks.values()

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

    def gone(self) -> list[int]:
        """The hosts that have left."""
        for host in list(self._mail):
            if self._mail[host].Test():
                del self._mail[host]
                self._gone.append(host)
        return list(self._gone)

    def leave(self) -> None:
        """Tell the others. The communicator is freed when all of them have left: else their last words would
        be read by the next one of its number."""
        try:
            if self.speaks:
                for host in self.others:
                    word = np.zeros(1, np.uint8)
                    self._farewells.append(self.comm.Issend([word, MPI.BYTE], self.ranks[host], _LEFT))
                until = time.monotonic() + _GOODBYE_S
                while not self.ended() and time.monotonic() < until:
                    time.sleep(1e-3)
        except MPI.Exception:
            return  # of a communicator that has lost someone: it is left as it is
        _open.append(self)
        free_closed()

    def ended(self) -> bool:
        """Whether everyone has left, and knows that this process has."""
        self._farewells = [request for request in self._farewells if not ended(request)]
        return not self._farewells and len(self.gone()) == len(self.others)


def free_closed() -> None:
    """Free the communicators of teams that all have left."""
    forget()
    for team in list(_open):
        try:
            if not team.speaks or team.ended():
                team.comm.Free()
                _open.remove(team)
        except MPI.Exception:
            _open.remove(team)
