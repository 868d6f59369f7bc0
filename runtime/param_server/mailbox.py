"""Messages of a server through MPI: whatever comes, from whomever, in the order of each; and answers."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from commplan.lowering.mpi.typing_shim import MPI
from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.param_server.store import Array, Pool, raw

FLYING = 8  # answers on their way to one worker at a time: more of them interleave, and take longer
_PROBES = 64  # messages that are looked for at a time
_LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class Mail(NamedTuple):
    """A message: u8 [nbytes] of the pool."""

    worker: int
    tag: int
    buffer: Array


class Post:
    """comm: of `workers` workers, which are its first ranks, and servers; for this alone.

    lost: workers that have died, in the order in which this was found, until `take_lost` takes them.
    """

    def __init__(self, comm: Any, workers: int, pool: Pool) -> None:
        self.comm, self.workers, self.pool = comm, workers, pool
        self.broken = ""  # why this server cannot go on
        self._status = MPI.Status()
        self._coming: dict[int, deque[tuple[Any, int, Array]]] = {}
        self._waiting: dict[int, deque[tuple[int, Array]]] = {}
        self._going: dict[int, deque[tuple[Any, Array]]] = {}
        self._dead: set[int] = set()
        self._fresh: list[int] = []
        self._survives = goes_on()

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._coming or self._going)

    def poll(self) -> list[Mail]:
        """What has come since, of each worker in its order."""
        self._probe()
        mail: list[Mail] = []
        for worker in list(self._coming):
            line = self._coming[worker]
            while line and self._done(line[0][0], worker):
                _, tag, buffer = line.popleft()
                mail.append(Mail(worker, tag, buffer))
            if not line or worker in self._dead:
                self._coming.pop(worker, None)
        self._send_on()
        return mail

    def send(self, worker: int, tag: int, array: Array) -> None:
        """Begin to send `array`, which must not change any more, after what was sent to the worker before."""
        if worker in self._dead:
            return
        self._waiting.setdefault(worker, deque()).append((tag, array))
        self._begin(worker)

    def take_lost(self) -> list[int]:
        """Workers that have died since; all that they had sent has been given out by `poll`, or is lost."""
        lost, self._fresh = self._fresh, []
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
            self._coming.setdefault(worker, deque()).append((request, tag, buffer))

    def _done(self, request: Any, worker: int) -> bool:
        """Whether a request of a living worker has ended well."""
        if worker in self._dead:
            return False
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            self._failure(error)
            return False

    def _send_on(self) -> None:
        for worker in list(self._going):
            line = self._going[worker]
            while line and self._done(line[0][0], worker):
                line.popleft()
            if worker in self._dead:
                self._going.pop(worker, None)
                self._waiting.pop(worker, None)
                continue
            self._begin(worker)
            if not line:
                self._going.pop(worker, None)

    def _begin(self, worker: int) -> None:
        waiting, line = self._waiting.get(worker), self._going.setdefault(worker, deque())
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
        """Find out who has died, where MPI can tell, so that the others can be listened to again."""
        if not self._survives or error.Get_error_class() not in _LOSSES:
            raise error
        if error.Get_error_class() == MPI.ERR_REVOKED:
            self.broken = self.broken or "another rank has given up, and has ended the job's communication"
            return
        group = self.comm.Get_failed()
        self.comm.Ack_failed(group.Get_size())
        ranks: list[int] = group.Translate_ranks(range(group.Get_size()), self.comm.Get_group())
        for rank in ranks:
            if rank >= self.workers:
                self.broken = self.broken or f"rank {rank}, a server, has died"
            elif rank not in self._dead:
                self._dead.add(rank)
                self._fresh.append(rank)
