"""Between hosts over MPI: the speaker of each host exchanges rows with the others, in the memory of the
slots.

A carrier has a communicator of its own, made of all processes that share, so that nothing it does meets
messages of the training. It is called from a thread that does nothing else, and sleeps while it waits.

Only the speaker of a host, its first living process, sends and receives. The others are there for the day
when it dies: with `on_failure = continue`, under an MPI that goes on without its dead (`ulfm`),
the next process of the host speaks for it, and parts whose whole host is gone are made by the readers that
are left.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from commplan.diagnostics import CommplanError, fail
from commplan.input.work_partition import Division, HostTransfer, failover
from commplan.lowering.mpi.lists import BrokenOffError
from commplan.runtime.input.group import Blame
from commplan.runtime.input.observe.wait_log import LOG, Cadence, ClosedError, WaitReporter
from commplan.runtime.input.transport.mpi_group import Team, free_closed, goes_on
from commplan.runtime.input.transport.transfer_plan import Form
from commplan.runtime.input.transport.transport import RegroupedError, RowSlices
from commplan.runtime.input.transport.ulfm import Survivors
from commplan.wait import Wait

LOOK_S = 0.05  # seconds between two looks at who has died or left
_GIVEN_UP = re.compile(r"\? (-?\d+) (\S+)")  # the last word of who has waited for a host, so many seconds
_LAST_WORDS_S = 1.0  # seconds that what a host sent before it left may take


class _SilencedError(Exception):
    """A speaker has died, and there will be another team."""


class MpiCarrier:
    """See `commplan.runtime.input.transport.transport.Carrier`.

    comm: a communicator of the processes of `division`, rank i being process i, for this carrier alone;
    `close` gives it back. All of them make one alike. blame: the line that shares. timeout: seconds to wait
    for a host that lives but is silent.

    `carry` raises CP0935 where a process of another host died or left, CP0937 where one is silent, CP0938
    where MPI fails, `ClosedError` once stopped. With on_failure = "continue" the death of a process is no
    error but `RegroupedError`, where parts change hosts; that takes an MPI that outlives its dead (CP0936,
    raised here).
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
        self.sent = self.received = 0  # bytes, so far
        self._process = int(comm.Get_rank())
        self._blame, self._timeout = blame, timeout
        self._cause = ""  # code and message of what has failed first
        if on_failure == "continue" and not goes_on():
            comm.Free()
            self._fail(
                "CP0936",
                "`on_failure = continue` needs an MPI that outlives its dead, and this one is none",
                "start it with: mpirun --with-ft ulfm --mca async_mpi_finalize 1 ... (Open MPI 5)",
            )
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._team = self._speaking = Team(comm, range(len(division.hosts)), division.hosts)
        self._survivors = Survivors(self._team, division.hosts) if on_failure == "continue" else None
        self._due: RegroupedError | None = None
        self._busy = threading.Lock()
        self._stopped = self._closed = False
        self._cadence, self._lasting = Cadence(), WaitReporter()  # of the batches, of the wait for one
        self._gave_up = 0.0, 0.0  # when, on `time.monotonic`, and after how many seconds

    # --- the calls of the ring ---

    def carry(
        self, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1
    ) -> None:
        del count
        with self._busy:
            self._go_on()
            self._lasting = WaitReporter(self._cadence.usual_s())
            if self._survivors is None:
                try:
                    self._exchange(self._team, parcels)
                except (BrokenOffError, MPI.Exception) as error:
                    self._raise_dead(self._team, error)
            else:
                self._survive(self._survivors, number, parcels, before)
            self._cadence.came()

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """End what is under way, and tell the other hosts. May be called twice."""
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
        """Carry out `moves` on parcels that lie in one memory."""
        if not moves:
            return
        addresses = [parcel.cells.ctypes.data for parcel in parcels]
        base = min(addresses)
        forms = tuple(map(_form, parcels, (address - base for address in addresses)))
        host = self.division.hosts[self._process]
        try:
            transfers = team.transfers(moves, host, forms)
        except CommplanError as error:  # without the engine; the other hosts are told when this one leaves
            first = error.diagnostics[0]
            self._cause = self._cause or f"{first.code} host {host} failed: {first.message}"
            raise
        if transfers.number is not None:
            team.runner.run(transfers.number, base, self._waits, parcels)
        self.sent += transfers.sent
        self.received += transfers.received

    # --- the same, whoever dies ---

    def _survive(
        self, survivors: Survivors, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices]
    ) -> None:
        """Carry a batch, with those that are left."""
        if self._due is not None and self._due.number <= number:
            due, self._due = self._due, None
            raise due
        while True:
            self._go_on()
            team = self._speaking = survivors.team
            try:
                if self._process not in team.speakers.values():
                    raise _SilencedError  # this process speaks for its host from the next team on
                if team is not self._team and self._settle(team, number, parcels, before):
                    return
                self._exchange(team, parcels)
                self._pulse(team)
                return
            except _SilencedError:
                team.revoke()
            except (BrokenOffError, MPI.Exception) as error:
                if not (team.dead() or team.revoked()):
                    self._refused(str(error))
                team.revoke()
            team.close()
            self._await_survivors(survivors, team)

    def _settle(
        self, team: Team, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices]
    ) -> bool:
        """What the speakers of a new team do first: find out which batch each is at, give the last one to
        those that have not got it, and agree on who makes what. True where batch `number` came that way.

        Hosts are one batch apart at most: nobody ends a batch before all have ended the one before.
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
        """Where some hosts make no rows, learn that they have got those of this batch: see `_settle`."""
        makers = {self.division.hosts[reader] for reader in self.division.readers}
        if not makers.issuperset(team.speakers):
            self._gathered(team, 0)

    def _gathered(self, team: Team, number: int) -> dict[int, int]:
        """What the speaker of each host gives. All of them call it."""
        hosts = tuple(team.speakers)
        numbers = np.zeros((1, len(hosts), 1), np.int64)
        numbers[0, hosts.index(self.division.hosts[self._process])] = number
        parcel = RowSlices(numbers.view(np.uint8), tuple(range(len(hosts) + 1)))
        move = HostTransfer("all_gather", hosts, tuple((place,) for place in range(len(hosts))))
        self._run(team, (move,), (parcel,))
        return dict(zip(hosts, numbers.ravel().tolist(), strict=True))

    def _await_survivors(self, survivors: Survivors, team: Team) -> None:
        def late(_: float) -> NoReturn:
            self._fail("CP0937", f"those who are left did not find each other within {self._timeout:g} s")

        def look(_: float) -> None:
            self._go_on()

        survivors.after(team, Wait(self._timeout, late, look, LOOK_S))

    # --- looking after the others ---

    def _go_on(self) -> None:
        if self._stopped:
            raise ClosedError
        failure = None if self._survivors is None else self._survivors.failure
        if isinstance(failure, MPI.Exception):
            self._refused(str(failure))
        if failure is not None:
            why = f"{type(failure).__name__}: {failure}"
            self._fail("CP0938", f"the thread that finds out who is left has ended: {why}")

    def _waits(self, waited: float, rank: int) -> None:
        """Nothing has moved for so many seconds; a message from `rank` of the team, or to it, is the first
        that has not."""
        self._look(waited)
        team = self._speaking
        host = next((host for host, other in team.ranks.items() if other == rank), -1)
        given_up = {other: match for other, word in team.gone().items() if (match := _GIVEN_UP.match(word))}
        if waited < self._timeout and not given_up:
            if self._lasting.due(waited):
                text = "process %d on host %d has waited %.0f s for %s; line %d waits for its part"
                mine = self.division.hosts[self._process]
                LOG.warning(text, self._process, mine, waited, self._named(host), self._blame.span.line)
            return
        if not team.told:
            first = next(iter(given_up.values()), None)
            self._gave_up = time.monotonic(), self._timeout if first is None else float(first[2])
            team.tell(f"? {host} {self._gave_up[1]:g}")
        begun, seconds = self._gave_up
        if time.monotonic() < begun + _LAST_WORDS_S:
            return
        # Rows come from host to host: who waits for another one in turn is not the one that is silent.
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
        # Where a call was under way, not every revocation is told: there may be another team already.
        if survivors is not None and (survivors.team is not team or team.silenced()):
            raise _SilencedError
        if survivors is None and (dead := team.dead()):
            self._died(team, dead)
        gone = {host: word for host, word in team.gone().items() if not _GIVEN_UP.match(word)}
        if not gone or waited < _LAST_WORDS_S:
            return
        for host, cause in gone.items():
            if not cause:
                self._fail("CP0935", f"host {host} left: its batches were closed before the epoch's end")
        host, self._cause = next(iter(gone.items()))
        code, _, message = self._cause.partition(" ")
        self._fail(code, message, f"host {host} says so")

    def _raise_dead(self, team: Team, error: Exception) -> NoReturn:
        """The engine, which waits for news of deaths, gave up: say who died, or what it said. The others
        learn of it by the revocation."""
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


@functools.lru_cache(maxsize=16)  # there are few regroupings
def _moves(division: Division, processes: tuple[int, ...]) -> tuple[HostTransfer, ...]:
    return division.moves(processes)


def _form(parcel: RowSlices, at: int) -> Form:
    copies, rows, row_nbytes = parcel.cells.shape
    return Form(copies, rows, row_nbytes, parcel.bounds, at)
