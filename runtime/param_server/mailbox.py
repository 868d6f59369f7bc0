"""A server's messages over MPI.

Messages of all workers are received as they arrive, and answers are sent in order to each worker.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from mpi4py import MPI

from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.param_server.store import Array, Pool, raw

IN_FLIGHT = 8  # The most answers in flight to one worker. More would interleave and take longer.
_PROBES = 64  # The most messages that one poll begins to receive.
# The classes of MPI errors for ranks that have died.
_FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class Mail(NamedTuple):
    """A message.

    Attributes:
        worker: The rank that sent it. Ranks after the workers are servers.
        tag: The tag.
        buffer: The content, u8[nbytes], in memory of the pool. The receiver returns it to the pool.
    """

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

    Attributes:
        broken: The reason why this server cannot continue, or "". `poll` and `send` may set it.
    """

    def __init__(self, comm: Any, workers: int, pool: Pool) -> None:
        self.comm, self.workers, self.pool = comm, workers, pool
        self.broken = ""
        self._status = MPI.Status()
        # By rank, oldest first: the request, tag and buffer of each receive that has begun.
        self._receiving: dict[int, deque[tuple[Any, int, Array]]] = {}
        # The tag and array of each send that has not begun, and the request and array of each that has.
        self._waiting: dict[int, deque[tuple[int, Array]]] = {}
        self._sending: dict[int, deque[tuple[Any, Array]]] = {}
        self._dead: set[int] = set()
        self._lost: list[int] = []  # Those of the dead that `take_lost` has not returned.
        self._survives_failures = goes_on()

    @property
    def is_busy(self) -> bool:
        """Whether messages are being received or sent."""
        return bool(self._receiving or self._sending)

    def poll(self) -> list[Mail]:
        """Return the messages that have arrived since the last call, in order for each worker.

        Also continues sends. Raises `MPI.Exception` for errors other than the death of a rank.
        """
        self._probe()
        mail: list[Mail] = []
        for worker in list(self._receiving):
            receiving = self._receiving[worker]
            while receiving and self._has_completed(receiving[0][0], worker):
                _, tag, buffer = receiving.popleft()
                mail.append(Mail(worker, tag, buffer))
            if not receiving or worker in self._dead:
                self._receiving.pop(worker, None)
        self._continue_sends()
        return mail

    def send(self, worker: int, tag: int, array: Array) -> None:
        """Send `array` after earlier messages to the worker. It must be contiguous, and not change any more.

        Returns at once. Has no effect if the worker has died.
        """
        if worker in self._dead:
            return
        self._waiting.setdefault(worker, deque()).append((tag, array))
        self._begin_sends(worker)

    def take_lost(self) -> list[int]:
        """Return the workers that have died since the last call. `poll` returns no more messages of them."""
        lost, self._lost = self._lost, []
        return lost

    def _probe(self) -> None:
        """Begin to receive the messages that have arrived."""
        for _ in range(_PROBES):
            try:
                message = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
                if message is None:
                    return
                worker, tag = self._status.Get_source(), self._status.Get_tag()
                buffer = self.pool.take(self._status.Get_count(MPI.BYTE))
                request = message.Irecv([buffer, MPI.BYTE])
            except MPI.Exception as error:
                self._handle_failure(error)
                return
            self._receiving.setdefault(worker, deque()).append((request, tag, buffer))

    def _has_completed(self, request: Any, worker: int) -> bool:
        """Whether a request has completed; False if the worker has died."""
        if worker in self._dead:
            return False
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            self._handle_failure(error)
            return False

    def _continue_sends(self) -> None:
        """Remove completed sends, and begin those that wait."""
        for worker in list(self._sending):
            sending = self._sending[worker]
            while sending and self._has_completed(sending[0][0], worker):
                sending.popleft()
            if worker in self._dead:
                self._sending.pop(worker, None)
                self._waiting.pop(worker, None)
                continue
            self._begin_sends(worker)
            if not sending:
                self._sending.pop(worker, None)

    def _begin_sends(self, worker: int) -> None:
        """Begin waiting sends to a worker, at most `IN_FLIGHT` at a time."""
        waiting = self._waiting.get(worker)
        sending = self._sending.setdefault(worker, deque())
        while waiting and len(sending) < IN_FLIGHT:
            tag, array = waiting.popleft()
            try:
                sending.append((self.comm.Isend([raw(array), MPI.BYTE], worker, tag), array))
            except MPI.Exception as error:
                self._handle_failure(error)
                return
        if not waiting:
            self._waiting.pop(worker, None)

    def _handle_failure(self, error: Any) -> None:
        """Acknowledge failed ranks, so that messages of the others can be received. Raises other errors."""
        if not self._survives_failures or error.Get_error_class() not in _FAILURES:
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
