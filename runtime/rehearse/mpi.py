"""Exchange summaries and errors between the ranks of a rehearsal under MPI.

The command makes a `World`, which the ranks use to print one report, and each error once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from mpi4py import MPI

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail_if
from commplan.ir.plan import Plan
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.machines.communicator import sizes_of
from commplan.runtime.machines.ranks import death, deaths
from commplan.runtime.observe.abort_hook import exempt
from commplan.sidecar import leave

PATIENCE_S = 3.0  # Seconds that failed ranks wait for one another; a rank in a collective never answers.
_LOOK_S = 0.01  # Seconds between two polls for messages.
_ERRORS = 1  # The tag of the errors of a rank, which it sends to the first rank.
_VERDICT = 2  # The tag of the answer: whether all ranks have failed.
# The codes of errors that peers report about a failed rank. Its own error is more specific.
_SECONDARY = ("CP0834", "CP0845", "CP0849", "CP0854", "CP0855", "CP0920", "CP0921", "CP0922")

Errors = list[Diagnostic]


class World:
    """The ranks that `mpirun` started. Every rank makes one before any other joint call.

    Afterwards a failing rank does not end the job. The caller ends it after `failed`.

    Attributes:
        comm: The communicator to which the plan is bound.
        rank: The number of this rank.
        size: The number of ranks.
    """

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self._rendezvous = Rendezvous(self.comm, "rehearse the plan")
        with deaths(self.comm):
            self._comm = self._rendezvous(self.comm.Dup)
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self._has_agreed = False  # Whether `agree` was called.
        self._agreed_errors: Errors = []  # The merged errors of all ranks, from `agree`.
        exempt()

    def sizes(self, plan: Plan, passed: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the plan's axes; an axis without a size gets the ranks that remain. See `sizes_of`."""
        return sizes_of(plan, self.comm, dict(passed))

    def gather(self, value: Any) -> list[Any]:
        """Collect a value of each living rank; all of them call this.

        Returns:
            On the first living rank the values in the order of ranks; elsewhere an empty list.

        Raises:
            CommplanError: CP0834 if a rank dies; CP0849 if one does not arrive.
        """
        with deaths(self.comm):
            comm = self._rendezvous(self._comm.Shrink) if goes_on() else self._comm
            return self._rendezvous(comm.gather, value) or []

    def agree(self, errors: Sequence[Diagnostic] = ()) -> None:
        """Agree with all ranks on the errors so far.

        All ranks call this once, before any other joint call, with their own errors. It raises the merged
        errors of all ranks on all ranks, and returns if there are none.
        """
        self._has_agreed = True  # Set first: afterwards some ranks may be gone.
        with deaths(self.comm):
            answers: list[Errors] = self._rendezvous(self._comm.allgather, list(errors))
        self._agreed_errors = merge_errors(
            {rank: problems for rank, problems in enumerate(answers) if problems}, self.size
        )
        fail_if(self._agreed_errors)

    def failed(self, errors: Sequence[Diagnostic]) -> tuple[Errors, bool]:
        """Agree with the other ranks that failed.

        If the first living rank has failed, it receives the errors of ranks that fail within `PATIENCE_S`
        and reports for all. If some ranks have not failed, the caller ends them, because they may wait for
        this rank in a collective.

        Args:
            errors: The errors of this rank.

        Returns:
            The errors that this rank prints, and whether all ranks have failed.
        """
        if not self._has_agreed:
            with contextlib.suppress(CommplanError):
                self.agree(errors)
        if self._agreed_errors:
            return self._agreed_errors if self.rank == 0 else [], True
        living = self._living()
        if living == [self.rank]:
            return list(errors), True
        try:
            if self.rank == living[0]:
                return self._receive(list(errors), living)
            return self._send(list(errors), living[0])
        except MPI.Exception:  # Another rank has died.
            return merge_errors({self.rank: list(errors)}, self.size), False

    def _living(self) -> list[int]:
        """The ranks that are not known to have died. Receives from any rank then ignore the dead ones."""
        if not goes_on():
            return list(range(self.size))
        dead = self._comm.Get_failed()
        self._comm.Ack_failed(dead.Get_size())
        dead_ranks: list[int] = dead.Translate_ranks(range(dead.Get_size()), self._comm.Get_group())
        return [rank for rank in range(self.size) if rank not in dead_ranks]

    def reason(self, error: Exception) -> Diagnostic | None:
        """See `ranks.death`."""
        return death(self.comm, error)

    def abort(self, code: int) -> None:
        """End all ranks with the exit status `code`."""
        leave()
        self._comm.Abort(code)

    def _receive(self, errors: Errors, living: Sequence[int]) -> tuple[Errors, bool]:
        """Collect the errors of all ranks on this one; returns them, and whether all ranks have failed."""
        answers: dict[int, Errors] = {self.rank: errors}
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < len(living) and time.monotonic() < deadline:
            if self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_ERRORS):
                status = MPI.Status()
                answer: Errors = self._comm.recv(source=MPI.ANY_SOURCE, tag=_ERRORS, status=status)
                answers[int(status.Get_source())] = answer
            else:
                time.sleep(_LOOK_S)

        all_failed = len(answers) == len(living)
        for rank in answers:
            if rank != self.rank:
                self._comm.send(all_failed, dest=rank, tag=_VERDICT)
        # Ranks without errors failed because of other ranks' errors.
        silent = sum(not problems for problems in answers.values())
        return merge_errors(answers, len(living) - silent), all_failed

    def _send(self, errors: Errors, first: int) -> tuple[Errors, bool]:
        """Send the errors of this rank to the first rank; see `failed` for the result.

        This rank prints its errors itself if the first rank does not receive them, as it has not failed.
        """
        # This send completes when the first rank starts to receive it.
        request = self._comm.issend(errors, dest=first, tag=_ERRORS)
        deadline = time.monotonic() + PATIENCE_S
        while not request.Test():
            if time.monotonic() > deadline:
                request.Cancel()
                return merge_errors({self.rank: errors}, self.size), False
            time.sleep(_LOOK_S)
        if self._rendezvous.among((first, self.rank))(lambda: self._comm.recv(source=first, tag=_VERDICT)):
            return [], True
        time.sleep(PATIENCE_S)  # The first rank prints the errors and ends this rank.
        return [], False


def merge_errors(answers: Mapping[int, Errors], size: int) -> Errors:
    """Merge the errors of several ranks.

    Each error appears once, with its ranks unless all have it. Errors of peers about a failed rank are
    omitted if any other error is reported.

    Args:
        answers: The errors of each rank, by its number.
        size: The number of ranks that counts as all.
    """
    ranks_of: dict[tuple[str, str], tuple[Diagnostic, list[int]]] = {}
    for rank in sorted(answers):
        for problem in answers[rank]:
            _, ranks = ranks_of.setdefault((problem.code, problem.message), (problem, []))
            ranks.append(rank)
    first = [entry for entry in ranks_of.values() if entry[0].code not in _SECONDARY] or list(
        ranks_of.values()
    )
    return [problem if len(ranks) == size else _with(problem, ranks) for problem, ranks in first]


def _with(problem: Diagnostic, ranks: Sequence[int]) -> Diagnostic:
    """`problem` with a note that names `ranks`."""
    named = ", ".join(str(rank) for rank in ranks)
    note = Note(f"on rank {named}" if len(ranks) == 1 else f"on ranks {named}")
    return msgspec.structs.replace(problem, notes=(*problem.notes, note))
