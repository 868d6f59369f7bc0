"""Going on without the dead: who is left of a team, found out by all of them together.

A speaker that dies is noticed by whoever waits for it, or by the launcher. Whoever notices revokes the
communicator, which ends every call on it everywhere; then all living processes shrink it to those that are
left. A thread in each process takes part in that, for most processes make no calls of their own. What the
speakers then do about the batch that was under way is the carrier's affair.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from mpi4py import MPI

from commplan.runtime.input.transport.mpi_group import Team
from commplan.wait import Wait, until

WATCH_S = 0.1  # seconds between two looks of the thread
PATIENCE_S = 5.0  # for it to end
LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS)


class Survivors:
    """The team of this moment. All processes of `team` make one alike; `close` ends its thread.

    failure: what ended the thread, which nobody else does the work of; None while it is at it.
    """

    def __init__(self, team: Team, hosts: Sequence[int]) -> None:
        self.team = team
        self._hosts = tuple(hosts)
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self.failure: BaseException | None = None
        # A daemon, so that forgotten batches do not keep the interpreter alive; it must end before MPI does.
        self._thread = threading.Thread(target=self._watch, name="commplan-survivors", daemon=True)
        self._end = weakref.finalize(self, _end, self._ending, self._thread)
        self._thread.start()

    def after(self, team: Team, wait: Wait) -> Team:
        """The team that follows `team`, once there is one: no longer than `wait.look` likes where there is a
        `failure`."""

        def follower(seconds: float) -> Team | None:
            with self._changed:
                if self.team is team and self.failure is None:
                    self._changed.wait(seconds)
                return None if self.team is team else self.team

        return until(follower, wait)

    def close(self) -> None:
        """End the thread."""
        self._end()

    def _watch(self) -> None:
        try:
            while not self._ending.wait(WATCH_S):
                self._look()
        except BaseException as error:  # noqa: BLE001  told by whoever carries a batch
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _look(self) -> None:
        try:
            if self.team.silenced():
                self.team.revoke()
            if self.team.revoked():
                self._regroup()
        except MPI.Exception as error:
            if error.Get_error_class() not in LOSSES:
                raise

    def _regroup(self) -> None:
        """Shrink the communicator; every living process is here, or will be within moments."""
        old = self.team
        comm = old.comm.Shrink()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        group = comm.Get_group()
        ranks: list[int] = group.Translate_ranks(range(group.Get_size()), old.comm.Get_group())
        with self._changed:
            self.team = Team(comm, [old.processes[rank] for rank in ranks], self._hosts)
            self._changed.notify_all()


def _end(ending: threading.Event, thread: threading.Thread) -> None:
    """A process that has left already takes no part in a regrouping, which may then wait for it for ever."""
    ending.set()
    if thread is not threading.current_thread():
        thread.join(PATIENCE_S)
