"""Transfers between hosts over MPI: the speaker of each host exchanges rows with the others, in slot memory.

A carrier has a separate communicator of all processes that share, so that its messages cannot match messages
of the training. A dedicated thread calls it, and sleeps while it waits.

Only the speaker of a host, its first live process, sends and receives. The other processes are its
replacements. With `on_failure = continue`, under a fault-tolerant MPI (`ulfm`), the next process of the host
becomes its speaker. If a whole host is lost, the remaining readers make its parts.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from commplan.diagnostics import CommplanError, fail
from commplan.input.work_partition import Division, HostTransfer, failover
from commplan.lowering.mpi.lists import ListAbortedError
from commplan.runtime.input.group import Blame
from commplan.runtime.input.observe.wait_log import Cadence, ClosedError, WaitReporter, log_warning
from commplan.runtime.input.transport.mpi_group import Team, free_closed, goes_on
from commplan.runtime.input.transport.transfer_plan import Form
from commplan.runtime.input.transport.transport import RegroupedError, RowSlices
from commplan.runtime.input.transport.ulfm import Survivors
from commplan.wait import Wait

LOOK_S = 0.05  # seconds between two checks for dead or departed processes
_GIVEN_UP = re.compile(r"\? (-?\d+) (\S+)")  # the last message after a timeout: the awaited host, the seconds
_LAST_WORDS_S = 1.0  # seconds that messages sent by a host before it left may take


class _SilencedError(Exception):
    """A speaker has died, and another team will follow."""


class MpiCarrier:
    """A carrier over MPI (see `commplan.runtime.input.transport.transport.Carrier`).

    Every process of the division makes one, with equal arguments.

    Args:
        comm: a communicator of the processes of `division`, rank i being process i, for this carrier alone;
            `close` frees it.
        division: the hosts that make each part.
        blame: the place in the plan that errors refer to.
        on_failure: "stop", or "continue" after the death of a process, which requires a fault-tolerant MPI.
            `carry` then raises `RegroupedError` if parts move to another host.
        timeout: seconds that processes of this host may wait for a batch from a live but silent host.

    Raises:
        CommplanError: CP0936 if `on_failure` is "continue" and this MPI does not support it. From `carry`:
            CP0935 if a process of another host died or left, CP0937 if a host is silent, CP0938 if MPI fails.
        ClosedError: from `carry`, once stopped.
    """

    by_caller = False

    def __init__(
        self,
        comm: Any,
        division: Division,
        *,
        blame: Blame,
        on_failure: str = "stop",
        timeout: float = 1800.0,
    ) -> None:
        free_closed()
        self.division = self._planned = division
        self.sent = self.received = 0  # bytes so far
        self._process = int(comm.Get_rank())
        self._blame, self._timeout = blame, timeout
        self._cause = ""  # code and message of the first failure
        if on_failure == "continue" and not goes_on():
            comm.Free()
            self._fail(
                "CP0936",
                "`on_failure = continue` needs an MPI that survives a death, and this one does not",
                "start it with: mpirun --with-ft ulfm --mca async_mpi_finalize 1 ... (Open MPI 5)",
            )
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._team = self._speaking = Team(comm, range(len(division.hosts)), division.hosts)
        self._survivors = Survivors(self._team, division.hosts) if on_failure == "continue" else None
        self._due: RegroupedError | None = None
        self._busy = threading.Lock()
        self._stopped = self._closed = False
        self._cadence, self._lasting = Cadence(), WaitReporter()  # of the batches; of the current wait
        self._is_wanted: Callable[[], bool] = lambda: True
        self._looked_s = self._awaited_s = 0.0  # seconds without progress; those with a waiting consumer
        self._gave_up = 0.0, 0.0  # the time of the timeout, on `time.monotonic`, and the seconds waited

    # --- called by the ring ---

    def carry(
        self, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        del count
        with self._busy:
            self._go_on()
            self._is_wanted = is_wanted
            self._lasting = WaitReporter(self._cadence.usual_s())
            if self._survivors is None:
                try:
                    self._exchange(self._team, parcels)
                except (ListAbortedError, MPI.Exception) as error:
                    self._raise_dead(self._team, error)
            else:
                self._survive(self._survivors, number, parcels, before)
            self._cadence.came()

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """End transfers in progress, and notify the other hosts. May be called twice."""
        self._stopped = True
        with self._busy:
            if self._closed:
                return
            self._closed = True
            if self._survivors is not None:
                self._survivors.close()
                self._team = self._survivors.team
            self._team.leave(self._cause)

    # --- one batch ---

    def _exchange(self, team: Team, parcels: Sequence[RowSlices]) -> None:
        self._run(team, _moves(self.division, team.processes), parcels)

    def _run(self, team: Team, moves: tuple[HostTransfer, ...], parcels: Sequence[RowSlices]) -> None:
        """Carry out `moves` on parcels in one contiguous memory."""
        if not moves:
            return
        addresses = [slices.cells.ctypes.data for slices in parcels]
        base = min(addresses)
        forms = tuple(map(_form, parcels, (address - base for address in addresses)))
        host = self.division.hosts[self._process]
        try:
            transfers = team.transfers(moves, host, forms)
        except CommplanError as error:  # no engine; `close` reports the cause to the other hosts
            first = error.diagnostics[0]
            self._cause = self._cause or f"{first.code} host {host} failed: {first.message}"
            raise
        if transfers.number is not None:
            team.runner.run(transfers.number, base, self._waits, parcels)
        self.sent += transfers.sent
        self.received += transfers.received

    # --- one batch, after deaths ---

    def _survive(
        self, survivors: Survivors, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices]
    ) -> None:
        """Carry a batch with the surviving processes."""
        if self._due is not None and self._due.number <= number:
            due, self._due = self._due, None
            raise due
        while True:
            self._go_on()
            team = self._speaking = survivors.team
            try:
                if self._process not in team.speakers.values():
                    raise _SilencedError  # this process is the speaker of its host from the next team on
                if team is not self._team and self._settle(team, number, parcels, before):
                    return
                self._exchange(team, parcels)
                self._pulse(team)
                return
            except _SilencedError:
                team.revoke()
            except (ListAbortedError, MPI.Exception) as error:
                if not (team.dead() or team.revoked()):
                    self._refused(str(error))
                team.revoke()
            team.close()
            self._await_survivors(survivors, team)

    def _settle(
        self, team: Team, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices]
    ) -> bool:
        """Bring the speakers of a new team to the same batch.

        They exchange their batch numbers, broadcast the last batch to the hosts that lack it, and compute the
        new division. Hosts differ by one batch at most: none finishes a batch before all have finished the
        one before.

        Returns:
            Whether this host received batch `number` by the broadcast.

        Raises:
            RegroupedError: if parts have moved to another host.
        """
        numbers = self._gathered(team, number)
        last = max(numbers.values())
        behind = [host for host, other in numbers.items() if other < last]
        mine = self.division.hosts[self._process]
        if behind:
            source = next(host for host, other in numbers.items() if other == last)
            if mine in (source, *behind):
                whole = parcels if mine in behind else before
                spread = HostTransfer("broadcast", (source, *behind), (tuple(range(self.division.parts)),))
                self._run(team, (spread,), whole)
        now = failover(self._planned, team.processes)
        changed = [self.division.hosts[r] for r in self.division.readers] != [
            now.hosts[r] for r in now.readers
        ]
        self._team, self.division = team, now
        if changed and mine not in behind:
            raise RegroupedError(number, now)
        if changed:
            self._due = RegroupedError(last, now)
        return mine in behind

    def _pulse(self, team: Team) -> None:
        """If some hosts make no rows, confirm that they have received this batch (see `_settle`)."""
        makers = {self.division.hosts[reader] for reader in self.division.readers}
        if not makers.issuperset(team.speakers):
            self._gathered(team, 0)

    def _gathered(self, team: Team, number: int) -> dict[int, int]:
        """The number passed by the speaker of each host. A collective call of all speakers."""
        hosts = tuple(team.speakers)
        numbers = np.zeros((1, len(hosts), 1), np.int64)
        numbers[0, hosts.index(self.division.hosts[self._process])] = number
        slices = RowSlices(numbers.view(np.uint8), tuple(range(len(hosts) + 1)))
        move = HostTransfer("all_gather", hosts, tuple((place,) for place in range(len(hosts))))
        self._run(team, (move,), (slices,))
        return dict(zip(hosts, numbers.ravel().tolist(), strict=True))

    def _await_survivors(self, survivors: Survivors, team: Team) -> None:
        def late(_: float) -> NoReturn:
            self._fail(
                "CP0937", f"the remaining processes did not find each other within {self._timeout:g} s"
            )

        def look(_: float) -> None:
            self._go_on()

        survivors.after(team, Wait(self._timeout, late, look, LOOK_S))

    # --- watching the other processes ---

    def _go_on(self) -> None:
        if self._stopped:
            raise ClosedError
        failure = None if self._survivors is None else self._survivors.failure
        if isinstance(failure, MPI.Exception):
            self._refused(str(failure))
        if failure is not None:
            why = f"{type(failure).__name__}: {failure}"
            self._fail("CP0938", f"the thread that determines the remaining processes has ended: {why}")

    def _waits(self, waited: float, rank: int) -> None:
        """Check the other hosts during a wait. rank: of the team, the peer of the first unfinished
        message."""
        self._look(waited)
        if waited < self._looked_s:  # progress since the last call
            self._looked_s = self._awaited_s = 0.0
        self._awaited_s += (waited - self._looked_s) * self._is_wanted()
        self._looked_s, waited = waited, self._awaited_s
        team = self._speaking
        host = next((host for host, other in team.ranks.items() if other == rank), -1)
        given_up = {
            other: match for other, word in team.reports().items() if (match := _GIVEN_UP.match(word))
        }
        if waited < self._timeout and not given_up:
            if self._lasting.due(waited):
                text = "process %d on host %d has waited %.0f s for %s; line %d waits for its part"
                mine = self.division.hosts[self._process]
                log_warning(text, self._process, mine, waited, self._named(host), self._blame.span.line)
            return
        if not team.has_reported:
            first = next(iter(given_up.values()), None)
            self._gave_up = time.monotonic(), self._timeout if first is None else float(first[2])
            team.tell(f"? {host} {self._gave_up[1]:g}")
        begun, seconds = self._gave_up
        if time.monotonic() < begun + _LAST_WORDS_S:
            return
        # Hosts relay rows: a host that waits for another one in turn is not the silent one.
        awaited = {other: int(match[1]) for other, match in given_up.items()}
        for _ in awaited:
            host = awaited.get(host, host)
        self._fail("CP0937", f"{self._named(host)} was silent for {seconds:g} s")

    def _named(self, host: int) -> str:
        process = self._speaking.speakers.get(host)
        return "another host" if process is None else f"process {process} on host {host}"

    def _look(self, waited: float) -> None:
        self._go_on()
        team, survivors = self._speaking, self._survivors
        # A call in progress may miss a revocation: there may be another team already.
        if survivors is not None and (survivors.team is not team or team.silenced()):
            raise _SilencedError
        if survivors is None and (dead := team.dead()):
            self._died(team, dead)
        reports = {host: word for host, word in team.reports().items() if not _GIVEN_UP.match(word)}
        if not reports or waited < _LAST_WORDS_S:
            return
        for host, cause in reports.items():
            if not cause:
                self._fail("CP0935", f"host {host} left: its batches were closed before the epoch's end")
        host, self._cause = next(iter(reports.items()))
        code, _, message = self._cause.partition(" ")
        self._fail(code, message, f"host {host} says so")

    def _raise_dead(self, team: Team, error: Exception) -> NoReturn:
        """After an error of the engine, raise an error that names the dead processes, or otherwise
        reports the engine's message. Revokes the communicator, which informs the others."""
        if dead := team.dead():
            self._died(team, dead)
        team.revoke()
        self._refused(str(error))

    def _refused(self, why: str) -> NoReturn:
        self._fail("CP0938", f"MPI failed: {why}")

    def _died(self, team: Team, dead: Sequence[int]) -> NoReturn:
        team.revoke()
        hosts = self.division.hosts
        who = [f"{process} (rank {team.rank_in_world(process)}, host {hosts[process]})" for process in dead]
        self._fail(
            "CP0935", f"process{'es' if len(who) > 1 else ''} {' and '.join(who)} of {len(hosts)} died"
        )

    def _fail(self, code: str, message: str, *notes: str) -> NoReturn:
        blame, hosts = self._blame, self.division.hosts
        cause = f"host {hosts[self._process]} failed: {message}" if code == "CP0938" else message
        self._cause = self._cause or f"{code} {cause}"
        fail(
            code,
            f"{message}; line {blame.span.line} waits for the parts of every host",
            *notes,
            f"the line: {blame.line}",
            f"this is process {self._process} of {len(hosts)}, on host {hosts[self._process]}",
            span=blame.span,
            file=blame.file,
        )


@functools.lru_cache(maxsize=16)  # regroupings are few
def _moves(division: Division, processes: tuple[int, ...]) -> tuple[HostTransfer, ...]:
    return division.moves(processes)


def _form(slices: RowSlices, at: int) -> Form:
    copies, rows, row_nbytes = slices.cells.shape
    return Form(copies, rows, row_nbytes, slices.bounds, at)
