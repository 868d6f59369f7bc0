"""Transfers between hosts over MPI: the speaker of each host exchanges rows with the others, in slot memory.

A carrier has a separate communicator of all processes that share: its messages cannot match messages of the
training. A dedicated thread calls it, and sleeps while it waits.

Only the speaker of a host, its first live process, sends and receives. The other processes are its
replacements. With `on_failure = continue`, under a fault-tolerant MPI (`ulfm`), the next process of the host
becomes its speaker after a death. If a whole host is lost, the remaining readers make its parts.
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

LOOK_S = 0.05  # seconds between two checks for a stop during the wait for another team
# The last message of a host after a timeout: the host for which it waited, and the seconds.
_GIVEN_UP = re.compile(r"\? (-?\d+) (\S+)")
_LAST_WORDS_S = 1.0  # seconds that the messages which a host sent before it left may take to arrive


class _SilencedError(Exception):
    """A speaker has died, and another team will follow or has followed."""


class MpiCarrier:
    """A carrier over MPI (see `commplan.runtime.input.transport.transport.Carrier`).

    Every process of the division makes one, with equal arguments.

    Attributes:
        by_caller: False, see `Carrier.by_caller`.
        division: the makers of parts, without dead processes.
        sent: the bytes that this process has sent so far.
        received: the bytes that this process has received so far.

    Args:
        comm: an mpi4py communicator of the processes of `division` for this carrier alone, in which rank i is
            process i. It is freed after all have called `close`.
        division: the makers of parts.
        blame: the place in the plan that errors refer to.
        on_failure: "stop", or "continue" after the death of a process, which requires a fault-tolerant MPI.
            `carry` then raises `RegroupedError` if parts move to another host.
        timeout: seconds that processes of this host may wait for a batch from a live but silent host.

    Raises:
        CommplanError: CP0936 if `on_failure` is "continue" and this MPI does not support it. From `carry`:
            CP0935 if a process of another host died or left, CP0937 if a host is silent, CP0938 if MPI fails,
            CP0830 if the engine is not available. A failure that another host reports has its code.
        ClosedError: from `carry`, once stopped.
        RegroupedError: from `carry`, see `on_failure`.
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
        self.division = self._planned = division  # after deaths, and at the start
        self.sent = self.received = 0
        self._process = int(comm.Get_rank())
        self._blame, self._timeout = blame, timeout
        self._cause = ""  # code and message of the first failure, for the other hosts; empty before
        if on_failure == "continue" and not goes_on():
            comm.Free()
            self._fail(
                "CP0936",
                "`on_failure = continue` needs an MPI that survives a death, and this one does not",
                "start it with: mpirun --with-ft ulfm --mca async_mpi_finalize 1 ... (Open MPI 5)",
            )
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        # The team to which `division` belongs, and the one that exchanges messages, which may be newer.
        self._team = self._speaking = Team(comm, range(len(division.hosts)), division.hosts)
        self._survivors = Survivors(self._team, division.hosts) if on_failure == "continue" else None
        self._due: RegroupedError | None = None  # raised by the `carry` of its batch
        self._busy = threading.Lock()  # held during `carry`
        self._stopped = self._closed = False
        self._cadence = Cadence()  # of the batches
        self._reporter = WaitReporter()  # of the current wait
        self._is_wanted: Callable[[], bool] = lambda: True  # of the current batch
        self._looked_s = 0.0  # seconds without progress at the last check
        self._awaited_s = 0.0  # those during which the batch was wanted
        self._gave_up = 0.0, 0.0  # the time of the timeout, on `time.monotonic`, and the seconds waited

    # --- called by the ring ---

    def carry(
        self, number: int, row_slices: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """See `Carrier.carry`. `count` is not used."""
        del count
        with self._busy:
            self._check_running()
            self._is_wanted = is_wanted
            self._reporter = WaitReporter(self._cadence.usual_s())
            if self._survivors is None:
                try:
                    self._exchange(self._team, row_slices)
                except (ListAbortedError, MPI.Exception) as error:
                    self._raise_dead(self._team, error)
            else:
                self._survive(self._survivors, number, row_slices, before)
            self._cadence.record_arrival()

    def stop(self) -> None:
        """See `Carrier.stop`."""
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

    def _exchange(self, team: Team, row_slices: Sequence[RowSlices]) -> None:
        """Carry out the moves of the division."""
        self._run(team, _moves(self.division, team.processes), row_slices)

    def _run(self, team: Team, moves: tuple[HostTransfer, ...], row_slices: Sequence[RowSlices]) -> None:
        """Carry out `moves` on arrays in one contiguous memory.

        Raises:
            ListAbortedError, MPI.Exception: If MPI fails, for example because a process has died.
            CommplanError: CP0830 if the engine is not available, and as `_waits`.
        """
        if not moves:
            return
        addresses = [slices.cells.ctypes.data for slices in row_slices]
        base = min(addresses)  # offsets instead of addresses: lists are cached by forms
        forms = tuple(map(_form, row_slices, (address - base for address in addresses)))
        host = self.division.hosts[self._process]
        try:
            transfers = team.transfers(moves, host, forms)
        except CommplanError as error:  # no engine; `close` reports the cause to the other hosts
            first = error.diagnostics[0]
            self._cause = self._cause or f"{first.code} host {host} failed: {first.message}"
            raise
        if transfers.number is not None:
            team.runner.run(transfers.number, base, self._waits, row_slices)
        self.sent += transfers.sent
        self.received += transfers.received

    # --- one batch, after deaths ---

    def _survive(
        self, survivors: Survivors, number: int, row_slices: Sequence[RowSlices], before: Sequence[RowSlices]
    ) -> None:
        """Carry a batch, if necessary several times, with the processes that survive. As `carry`."""
        if self._due is not None and self._due.number <= number:
            due, self._due = self._due, None
            raise due
        while True:
            self._check_running()
            team = self._speaking = survivors.team
            try:
                if self._process not in team.speakers.values():
                    raise _SilencedError  # this process is the speaker of its host from the next team on
                if team is not self._team and self._settle(team, number, row_slices, before):
                    return
                self._exchange(team, row_slices)
                self._pulse(team)
                return
            except _SilencedError:
                team.revoke()
            except (ListAbortedError, MPI.Exception) as error:
                if not (team.dead() or team.revoked()):
                    self._fail_mpi(str(error))
                team.revoke()
            team.close()
            self._await_survivors(survivors, team)

    def _settle(
        self, team: Team, number: int, row_slices: Sequence[RowSlices], before: Sequence[RowSlices]
    ) -> bool:
        """Bring the speakers of a new team to the same batch.

        They exchange their batch numbers, broadcast the batch that some hosts have completed to those that
        have not, and compute the new division. Hosts differ by one batch at most: none finishes a batch
        before all have finished the one before.

        Returns:
            Whether this host received batch `number` by the broadcast.

        Raises:
            RegroupedError: if parts have moved to another host, and this host is not behind. Otherwise it is
                raised for the next batch.
        """
        numbers = self._gathered(team, number)
        last = max(numbers.values())
        behind = [host for host, other in numbers.items() if other < last]
        this_host = self.division.hosts[self._process]
        if behind:
            source = next(host for host, other in numbers.items() if other == last)
            if this_host in (source, *behind):
                arrays = row_slices if this_host in behind else before
                move = HostTransfer("broadcast", (source, *behind), (tuple(range(self.division.parts)),))
                self._run(team, (move,), arrays)
        division = failover(self._planned, team.processes)
        makers_before = [self.division.hosts[reader] for reader in self.division.readers]
        has_changed = makers_before != [division.hosts[reader] for reader in division.readers]
        self._team, self.division = team, division
        if has_changed and this_host not in behind:
            raise RegroupedError(number, division)
        if has_changed:
            self._due = RegroupedError(last, division)
        return this_host in behind

    def _pulse(self, team: Team) -> None:
        """If some hosts make no rows, wait until all hosts have received this batch, as `_settle` assumes."""
        makers = {self.division.hosts[reader] for reader in self.division.readers}
        if not makers.issuperset(team.speakers):
            self._gathered(team, 0)

    def _gathered(self, team: Team, number: int) -> dict[int, int]:
        """The numbers that the speakers pass, by host. A collective call of all speakers."""
        hosts = tuple(team.speakers)
        numbers = np.zeros((1, len(hosts), 1), np.int64)
        numbers[0, hosts.index(self.division.hosts[self._process])] = number
        slices = RowSlices(numbers.view(np.uint8), tuple(range(len(hosts) + 1)))
        move = HostTransfer("all_gather", hosts, tuple((place,) for place in range(len(hosts))))
        self._run(team, (move,), (slices,))
        return dict(zip(hosts, numbers.ravel().tolist(), strict=True))

    def _await_survivors(self, survivors: Survivors, team: Team) -> None:
        """Wait for the team that follows `team`. Raises CP0937 after the timeout, and as `_check_running`."""

        def late(_: float) -> NoReturn:
            self._fail(
                "CP0937", f"the remaining processes did not find each other within {self._timeout:g} s"
            )

        def look(_: float) -> None:
            self._check_running()

        survivors.after(team, Wait(self._timeout, late, look, LOOK_S))

    # --- watching the other processes ---

    def _check_running(self) -> None:
        """Raise ClosedError after `stop`, or CP0938 if the thread of `Survivors` has failed."""
        if self._stopped:
            raise ClosedError
        failure = None if self._survivors is None else self._survivors.failure
        if isinstance(failure, MPI.Exception):
            self._fail_mpi(str(failure))
        if failure is not None:
            reason = f"{type(failure).__name__}: {failure}"
            self._fail("CP0938", f"the thread that determines the remaining processes has ended: {reason}")

    def _waits(self, waited: float, rank: int) -> None:
        """Check the other hosts during a wait. The engine calls this repeatedly.

        After the timeout, each host reports to the others for which host it waits. From these reports, all
        raise an error that names the silent host.

        Args:
            waited: seconds since the last progress.
            rank: the rank in the team of the peer of the first unfinished message; -1 if unknown.

        Raises:
            CommplanError: CP0937 after the timeout, and as `_look`.
        """
        self._look(waited)
        if waited < self._looked_s:  # progress since the last call
            self._looked_s = self._awaited_s = 0.0
        self._awaited_s += (waited - self._looked_s) * self._is_wanted()
        self._looked_s = waited
        team = self._speaking
        host = next((host for host, other in team.ranks.items() if other == rank), -1)
        given_up = {
            other: match for other, report in team.reports().items() if (match := _GIVEN_UP.match(report))
        }
        if self._awaited_s < self._timeout and not given_up:
            if self._reporter.due(self._awaited_s):
                text = "process %d on host %d has waited %.0f s for %s; line %d waits for its part"
                this_host, line = self.division.hosts[self._process], self._blame.span.line
                log_warning(text, self._process, this_host, self._awaited_s, self._speaker_of(host), line)
            return
        if not team.has_reported:
            first = next(iter(given_up.values()), None)
            self._gave_up = time.monotonic(), self._timeout if first is None else float(first[2])
            team.tell(f"? {host} {self._gave_up[1]:g}")
        gave_up_at, seconds = self._gave_up
        if time.monotonic() < gave_up_at + _LAST_WORDS_S:
            return
        # Hosts relay rows: a host that waits for another one in turn is not the silent one.
        awaited_hosts = {other: int(match[1]) for other, match in given_up.items()}
        for _ in awaited_hosts:
            host = awaited_hosts.get(host, host)
        self._fail("CP0937", f"{self._speaker_of(host)} was silent for {seconds:g} s")

    def _speaker_of(self, host: int) -> str:
        """The speaker of a host, for messages."""
        process = self._speaking.speakers.get(host)
        return "another host" if process is None else f"process {process} on host {host}"

    def _look(self, waited: float) -> None:
        """Check for deaths, and for failures that other hosts report.

        Args:
            waited: seconds since the last progress. Messages that a departed host sent may still arrive.

        Raises:
            CommplanError: CP0935 if a process died or a host left, or the failure of another host.
            _SilencedError: If a speaker died, and the plan continues.
            ClosedError: After `stop`.
        """
        self._check_running()
        team, survivors = self._speaking, self._survivors
        # A call in progress may miss a revocation: there may be another team already.
        if survivors is not None and (survivors.team is not team or team.silenced()):
            raise _SilencedError
        if survivors is None and (dead := team.dead()):
            self._fail_dead(team, dead)
        reports = {host: report for host, report in team.reports().items() if not _GIVEN_UP.match(report)}
        if not reports or waited < _LAST_WORDS_S:
            return
        for host, cause in reports.items():
            if not cause:  # it has left without a failure
                self._fail("CP0935", f"host {host} left: its batches were closed before the epoch's end")
        host, self._cause = next(iter(reports.items()))
        code, _, message = self._cause.partition(" ")
        self._fail(code, message, f"host {host} says so")

    def _raise_dead(self, team: Team, error: Exception) -> NoReturn:
        """Raise CP0935 with the dead processes, or CP0938 with the engine's error if there are none.

        Revokes the communicator, which informs the others.
        """
        if dead := team.dead():
            self._fail_dead(team, dead)
        team.revoke()
        self._fail_mpi(str(error))

    def _fail_mpi(self, reason: str) -> NoReturn:
        """Raise CP0938."""
        self._fail("CP0938", f"MPI failed: {reason}")

    def _fail_dead(self, team: Team, dead: Sequence[int]) -> NoReturn:
        """Raise CP0935 for dead processes, at least one."""
        team.revoke()
        hosts = self.division.hosts
        names = [f"{process} (rank {team.rank_in_world(process)}, host {hosts[process]})" for process in dead]
        self._fail(
            "CP0935", f"process{'es' if len(names) > 1 else ''} {' and '.join(names)} of {len(hosts)} died"
        )

    def _fail(self, code: str, message: str, *notes: str) -> NoReturn:
        """Raise an error with the plan line and this process. `close` sends the first one to the others."""
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
    """The moves of a division among live processes."""
    return division.moves(processes)


def _form(slices: RowSlices, offset: int) -> Form:
    """The form of an array at `offset` in bytes."""
    copies, rows, row_nbytes = slices.cells.shape
    return Form(copies, rows, row_nbytes, slices.bounds, offset)
