"""What the ranks of a rehearsal say to one another: summaries to the first, and mistakes as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail_if
from commplan.ir.plan import Plan
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.typing_shim import MPI
from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.machines.ranks import death, deaths, sizes_of
from commplan.runtime.observe.abort_hook import exempt
from commplan.sidecar import leave

PATIENCE_S = 3.0  # how long ranks that failed look for one another; a rank in a collective never looks
_LOOK_S = 0.01
_ERRORS, _VERDICT = 1, 2  # tags
_SECONDARY = (
    "CP0834",
    "CP0845",
    "CP0849",
    "CP0854",
    "CP0855",
    "CP0920",
    "CP0921",
    "CP0922",
)  # what peers say of a rank that failed: its own error says more

Said = list[Diagnostic]


class World:
    """The ranks that `mpirun` started. comm: what the plan is bound to."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self._meet = Rendezvous(self.comm, "rehearse the plan")
        with deaths(self.comm):
            self._own = self._meet(self.comm.Dup)
        self.rank, self.size = int(self._own.Get_rank()), int(self._own.Get_size())
        self._agreed = False
        self._known: Said = []
        exempt()

    def sizes(self, plan: Plan, given: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the plan's axes; one that is left open takes the ranks that are left."""
        return sizes_of(plan, self.comm, dict(given))

    def gather(self, mine: Any) -> list[Any]:
        """On the first rank that lives what each has that lives, in order; elsewhere nothing. All call it."""
        with deaths(self.comm):
            own = self._meet(self._own.Shrink) if goes_on() else self._own
            return self._meet(own.gather, mine) or []

    def agree(self, mine: Sequence[Diagnostic] = ()) -> None:
        """All ranks call this once, before anything else that they do together: with what is wrong where they
        are, or with nothing. Raises what is wrong anywhere, on all of them."""
        self._agreed = True  # or some are not there any more
        with deaths(self.comm):
            answers: list[Said] = self._meet(self._own.allgather, list(mine))
        self._known = together(
            {rank: problems for rank, problems in enumerate(answers) if problems}, self.size
        )
        fail_if(self._known)

    def failed(self, mine: Sequence[Diagnostic]) -> tuple[Said, bool]:
        """A rank that failed calls this: what it should print, and whether all ranks have failed.

        Those that failed within a moment are heard by the first rank, if it is one of them, and it speaks
        for all. Where not all have failed the caller ends the others, which may wait for this one in a
        collective.
        """
        if not self._agreed:
            with contextlib.suppress(CommplanError):
                self.agree(mine)
        if self._known:
            return self._known if self.rank == 0 else [], True
        living = self._living()
        if living == [self.rank]:
            return list(mine), True
        try:
            if self.rank == living[0]:
                return self._hear(list(mine), living)
            return self._tell(list(mine), living[0])
        except MPI.Exception:  # another one has died
            return together({self.rank: list(mine)}, self.size), False

    def _living(self) -> list[int]:
        """The ranks that are not known to have died, which may then be listened to."""
        if not goes_on():
            return list(range(self.size))
        dead = self._own.Get_failed()
        self._own.Ack_failed(dead.Get_size())
        known: list[int] = dead.Translate_ranks(range(dead.Get_size()), self._own.Get_group())
        return [rank for rank in range(self.size) if rank not in known]

    def reason(self, error: Exception) -> Diagnostic | None:
        """What is said of an error of MPI where that outlives its dead."""
        return death(self.comm, error)

    def abort(self, code: int) -> None:
        """End all ranks."""
        leave()
        self._own.Abort(code)

    def _hear(self, mine: Said, living: Sequence[int]) -> tuple[Said, bool]:
        answers: dict[int, Said] = {self.rank: mine}
        until = time.monotonic() + PATIENCE_S
        while len(answers) < len(living) and time.monotonic() < until:
            if self._own.Iprobe(source=MPI.ANY_SOURCE, tag=_ERRORS):
                status = MPI.Status()
                answer: Said = self._own.recv(source=MPI.ANY_SOURCE, tag=_ERRORS, status=status)
                answers[int(status.Get_source())] = answer
            else:
                time.sleep(_LOOK_S)
        everyone = len(answers) == len(living)
        for rank in answers:
            if rank != self.rank:
                self._own.send(everyone, dest=rank, tag=_VERDICT)
        silent = sum(not problems for problems in answers.values())  # they were told what is wrong by others
        return together(answers, len(living) - silent), everyone

    def _tell(self, mine: Said, first: int) -> tuple[Said, bool]:
        request = self._own.issend(
            mine, dest=first, tag=_ERRORS
        )  # ends when the first rank has begun to hear it
        until = time.monotonic() + PATIENCE_S
        while not request.Test():
            if time.monotonic() > until:
                request.Cancel()
                return together({self.rank: mine}, self.size), False
            time.sleep(_LOOK_S)
        if self._meet.among((first, self.rank))(lambda: self._own.recv(source=first, tag=_VERDICT)):
            return [], True
        time.sleep(PATIENCE_S)  # the first rank prints, and ends this one
        return [], False


def together(answers: Mapping[int, Said], size: int) -> Said:
    """What several ranks say, each thing once and with those that say it unless all do; what peers say of a
    rank that failed is left out where that rank has spoken."""
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
    named = ", ".join(str(rank) for rank in ranks)
    note = Note(f"on rank {named}" if len(ranks) == 1 else f"on ranks {named}")
    return msgspec.structs.replace(problem, notes=(*problem.notes, note))
