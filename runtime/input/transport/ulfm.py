"""Recovery after deaths: all surviving processes of a team form the next one together.

The death of a speaker is detected by a process that waits for it, or by the launcher. The detecting process
revokes the communicator, which ends every call on it everywhere; then all live processes shrink it to the
survivors. A thread in each process takes part, because most processes make no MPI calls of their own. The
carrier decides how the speakers finish the interrupted batch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from mpi4py import MPI

from commplan.runtime.input.transport.mpi_group import Team
from commplan.wait import Wait, until

WATCH_S = 0.1  # seconds between two checks of the thread
PATIENCE_S = 5.0  # seconds for the thread to end
LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS)


class Survivors:
    """The current team. All processes of `team` make one with equal arguments; `close` ends its thread.

    failure: the error that ended the thread, after which no team follows; None while it runs.
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
        """Wait for the team that follows `team`. After a `failure`, `wait.check` must end the wait."""

        def follower(seconds: float) -> Team | None:
            with self._changed:
                if self.team is team and self.failure is None:
                    self._changed.wait(seconds)
                return None if self.team is team else self.team

        return until(follower, wait)

    def close(self) -> None:
        """Stop the thread."""
        self._end()

    def _watch(self) -> None:
        try:
            while not self._ending.wait(WATCH_S):
                self._look()
        except BaseException as error:  # noqa: BLE001  raised by the next `carry`
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
        """Shrink the communicator: a collective call of all live processes."""
        old = self.team
        comm = old.comm.Shrink()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        group = comm.Get_group()
        ranks: list[int] = group.Translate_ranks(range(group.Get_size()), old.comm.Get_group())
        with self._changed:
            self.team = Team(comm, [old.processes[rank] for rank in ranks], self._hosts)
            self._changed.notify_all()


def _end(ending: threading.Event, thread: threading.Thread) -> None:
    """Stop the thread. Waits for it only PATIENCE_S seconds: a process that has left joins no regrouping,
    which may then never end."""
    ending.set()
    if thread is not threading.current_thread():
        thread.join(PATIENCE_S)
