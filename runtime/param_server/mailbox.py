"""A server's messages over MPI.

Messages of all workers are received as they arrive, and answers are sent in order to each worker.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from mpi4py import MPI

from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.param_server.store import Array, Pool, raw

FLYING = 8  # answers in flight to one worker; more would interleave and take longer
_PROBES = 64  # maximum number of messages per poll
_LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class Mail(NamedTuple):
    """A message, u8 [nbytes] of the pool."""

    worker: int
    tag: int
    buffer: Array


class Mailbox:
    """The messages of a server.

    Args:
        comm: A communicator for these messages only, whose first `workers` ranks are workers, and the others
            servers.
        workers: The number of workers.
        pool: Memory for messages.
    """

    def __init__(self, comm: Any, workers: int, pool: Pool) -> None:
        self.comm, self.workers, self.pool = comm, workers, pool
        self.broken = ""  # why this server cannot continue
        self._status = MPI.Status()
        self._receiving: dict[int, deque[tuple[Any, int, Array]]] = {}
        self._waiting: dict[int, deque[tuple[int, Array]]] = {}
        self._sending: dict[int, deque[tuple[Any, Array]]] = {}
        self._dead: set[int] = set()
        self._lost: list[int] = []
        self._survives = goes_on()

    @property
    def is_busy(self) -> bool:
        """Whether messages are in flight."""
        return bool(self._receiving or self._sending)

    def poll(self) -> list[Mail]:
        """The messages that have arrived since the last call, in order for each worker."""
        self._probe()
        mail: list[Mail] = []
        for worker in list(self._receiving):
            line = self._receiving[worker]
            while line and self._done(line[0][0], worker):
                _, tag, buffer = line.popleft()
                mail.append(Mail(worker, tag, buffer))
            if not line or worker in self._dead:
                self._receiving.pop(worker, None)
        self._send_on()
        return mail

    def send(self, worker: int, tag: int, array: Array) -> None:
        """Send `array` after earlier messages to the worker. It must not change any more."""
        if worker in self._dead:
            return
        self._waiting.setdefault(worker, deque()).append((tag, array))
        self._begin(worker)

    def take_lost(self) -> list[int]:
        """Workers that have died since the last call. `poll` has returned the messages that arrived."""
        lost, self._lost = self._lost, []
        return lost

    def _probe(self) -> None:
        for _ in range(_PROBES):
            try:
                message = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
                if message is None:
                    return
                worker, tag = self._status.Get_source(), self._status.Get_tag()
                buffer = self.pool.take(self._status.Get_count(MPI.BYTE))
                request = message.Irecv([buffer, MPI.BYTE])
            except MPI.Exception as error:
                self._failure(error)
                return
            self._receiving.setdefault(worker, deque()).append((request, tag, buffer))

    def _done(self, request: Any, worker: int) -> bool:
        """Whether a request of a living worker has completed."""
        if worker in self._dead:
            return False
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            self._failure(error)
            return False

    def _send_on(self) -> None:
        for worker in list(self._sending):
            line = self._sending[worker]
            while line and self._done(line[0][0], worker):
                line.popleft()
            if worker in self._dead:
                self._sending.pop(worker, None)
                self._waiting.pop(worker, None)
                continue
            self._begin(worker)
            if not line:
                self._sending.pop(worker, None)

    def _begin(self, worker: int) -> None:
        waiting, line = self._waiting.get(worker), self._sending.setdefault(worker, deque())
        while waiting and len(line) < FLYING:
            tag, array = waiting.popleft()
            try:
                line.append((self.comm.Isend([raw(array), MPI.BYTE], worker, tag), array))
            except MPI.Exception as error:
                self._failure(error)
                return
        if not waiting:
            self._waiting.pop(worker, None)

    def _failure(self, error: Any) -> None:
        """Acknowledge failed ranks, so that messages of the others can be received."""
        if not self._survives or error.Get_error_class() not in _LOSSES:
            raise error
        if error.Get_error_class() == MPI.ERR_REVOKED:
            self.broken = self.broken or "another rank has failed and has revoked the job's communicator"
            return
        group = self.comm.Get_failed()
        self.comm.Ack_failed(group.Get_size())
        ranks: list[int] = group.Translate_ranks(range(group.Get_size()), self.comm.Get_group())
        for rank in ranks:
            if rank >= self.workers:
                self.broken = self.broken or f"rank {rank}, a server, has died"
            elif rank not in self._dead:
                self._dead.add(rank)
                self._lost.append(rank)
