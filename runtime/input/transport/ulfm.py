"""Recovery after deaths: all surviving processes of a team form the next one together.

It uses ULFM (User Level Failure Mitigation), as in Open MPI 5. The death of a speaker (see `mpi_group.Team`)
is detected by a process that waits for it, or by the launcher. The detecting process revokes the
communicator, which ends every call on it in all processes. Then all live processes shrink it to the
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

WATCH_S = 0.1  # seconds between two checks of the team by the thread
PATIENCE_S = 5.0  # maximum wait in seconds for the thread to end
# Classes of errors that another death causes. The thread then tries again.
LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS)


class Survivors:
    """Holds the current team, and replaces it after the death of a speaker.

    All processes of `team` make one with equal arguments. `close` ends its thread.

    Attributes:
        team: the current team.
        failure: the error that ended the thread, after which no team follows; None while it runs.

    Args:
        team: the first team.
        hosts: the host of every process, including dead ones.
    """

    def __init__(self, team: Team, hosts: Sequence[int]) -> None:
        self.team = team
        self._hosts = tuple(hosts)
        self._changed = threading.Condition()  # notified after a change of `team` or `failure`
        self._ending = threading.Event()
        self.failure: BaseException | None = None
        # A daemon: batches that were not closed do not keep the interpreter alive. It must end before MPI.
        self._thread = threading.Thread(target=self._watch, name="commplan-survivors", daemon=True)
        self._end = weakref.finalize(self, _end, self._ending, self._thread)
        self._thread.start()

    def after(self, team: Team, wait: Wait) -> Team:
        """Wait for the team that follows `team`. After a `failure`, `wait.check` must raise: none follows."""

        def follower(seconds: float) -> Team | None:
            with self._changed:
                if self.team is team and self.failure is None:
                    self._changed.wait(seconds)
                return None if self.team is team else self.team

        return until(follower, wait)

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._end()

    def _watch(self) -> None:
        """Check the team repeatedly. The thread runs it."""
        try:
            while not self._ending.wait(WATCH_S):
                self._look()
        except BaseException as error:  # noqa: BLE001  raised by the next `carry`
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _look(self) -> None:
        """Form the next team if a speaker has died. Raises errors of MPI that no death causes."""
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
    """Stop the thread, and wait for it for up to `PATIENCE_S`.

    It may be in a collective call that never ends, because another process has left.
    """
    ending.set()
    if thread is not threading.current_thread():
        thread.join(PATIENCE_S)
