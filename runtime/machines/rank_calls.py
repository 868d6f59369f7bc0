"""How far other ranks are with the steps that all call together, asked over MPI while a step is compared.

A thread of each rank answers, because the main thread may wait in a collective. If a rank finds that another
rank already runs the compared step, is stopped or dead, or has ended its program, it raises an error. It
first sends the error to all others, and they end the job.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from mpi4py import MPI

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.hang_limits import most_patient
from commplan.lowering.mpi.job.rendezvous import highest_tag
from commplan.recorder.stacks import user_line
from commplan.recorder.verdict import FIRST
from commplan.runtime.machines.machine import digest
from commplan.runtime.observe.abort_hook import common, end_job
from commplan.runtime.observe.joint_calls import SETTLE_S, JointCalls, JointReport
from commplan.runtime.observe.peers import DOWN, Peer

_TICK_S = 0.1
_END_S = 10.0  # Seconds for the listener to end before MPI does.
_NOTICE_S = 10.0  # Seconds of waiting before late ranks are named.
_SILENT_S = 2.5 * SETTLE_S  # Seconds without an answer after which a rank is silent.
_SHOWN = 4  # The most ranks that a message names.
Key = tuple[bytes, int]  # A digest of the ranks in COMM_WORLD, and the number of their program.


class RankCalls(JointCalls):
    """The joint calls of the ranks `processes` of `comm`.

    Args:
        busy: Returns whether a collective runs here.
    """

    def __init__(self, comm: Any, processes: Sequence[Peer], busy: Any) -> None:
        super().__init__()
        ranks, world = [peer.process for peer in processes], MPI.COMM_WORLD.Get_group()
        self.numbers = dict(zip(map(int, comm.Get_group().Translate_ranks(ranks, world)), ranks, strict=True))
        self.processes = dict(zip(ranks, processes, strict=True))
        self.bound_s = most_patient([peer.limits for peer in processes]).watchdog_s
        self.busy = busy
        self.verdict: Diagnostic | None = None
        self.key = _listener().add(self)
        self._asked_at, self._is_reported = 0.0, False
        self._answered: dict[int, tuple[float, JointReport]] = {}  # By rank, since the wait began.

    def look(self, waited: float) -> None:
        listener, now, rank = _listener(), time.monotonic(), int(MPI.COMM_WORLD.Get_rank())
        if self.verdict is not None:
            raise self._error(self.verdict)
        if waited < SETTLE_S:
            self._is_reported = False
            self._answered.clear()
        if waited < SETTLE_S or now < self._asked_at + SETTLE_S:
            return
        answers = dict(listener.answers.pop(self.key, {}))  # The listener may still add one.
        reports = {self.numbers[world]: report for world, report in answers.items()}
        self._answered |= {number: (now, report) for number, report in reports.items()}
        other_ranks = [world for world in self.numbers if world != rank]
        diagnostic = self.disagreement(reports) or self._departure(now) or self._silence(now, waited, rank)
        if diagnostic is not None:
            listener.send("verdict", self.key, diagnostic, other_ranks)
            time.sleep(SETTLE_S / 2)  # The others print the error before this rank ends.
            raise self._error(diagnostic)
        if waited > _NOTICE_S and not self._is_reported:
            self._notice(now, waited, rank)
        self._asked_at = now
        listener.send("ask", self.key, rank, other_ranks)

    def _error(self, diagnostic: Diagnostic) -> CommplanError:
        """The error that all ranks raise. The first rank prints it in full, unless it is the missing one."""
        error, (world, first) = CommplanError(diagnostic), next(iter(self.numbers.items()))
        is_gone = world in _listener().departed or self.processes[first].state in DOWN
        if not is_gone and self.waited() < FIRST * (self.bound_s or inf):
            common(error)
        return error

    def _departure(self, now: float) -> Diagnostic | None:
        """The error if a rank's program has ended before the compared step."""
        for world, (heard, calls) in _listener().departed.items():
            number, name = calls.get(self.key, (0, ""))
            if world in self.numbers and now > heard + SETTLE_S and self.misses(number):
                rank = self.numbers[world]
                last = f", the last `{name}`" if name else ""
                called = f"rank {rank} has called {number} steps with collectives{last}"
                return self._missing(f"the program has ended on rank {rank}", [called])
        return None

    def _silent(self, now: float, rank: int) -> list[int]:
        """The ranks that do not answer. rank: this rank in COMM_WORLD."""
        answered_at = {number: at for number, (at, _) in self._answered.items()}
        numbers = (number for world, number in self.numbers.items() if world != rank)
        return [number for number in numbers if now > answered_at.get(number, 0.0) + _SILENT_S]

    def _silence(self, now: float, waited: float, rank: int) -> Diagnostic | None:
        """The error if ranks are stopped or dead, or have not answered for `FIRST` times the bound."""
        if self.bound_s is None or waited < self.bound_s:
            return None
        states = {number: self.processes[number].state for number in self._silent(now, rank)}
        answering = {self.numbers[world] for world in _listener().heard if world in self.numbers}
        hung = answering if waited > FIRST * self.bound_s else set[int]()
        states = {number: state for number, state in states.items() if state in DOWN or number in hung}
        if not states:
            return None
        first, *more = [f"rank {n} {self.processes[n].silence(state)}" for n, state in states.items()]
        notes = [self.processes[n].identity(state, "rank") for n, state in states.items()]
        notes += [f"rank {n} was at {self._answered[n][1].place}" for n in states if n in self._answered]
        return self._missing(first, [*more, *notes])

    def _missing(self, message: str, notes: Sequence[str]) -> Diagnostic:
        place = user_line() or "an unknown line"
        waits = f"the comparison of a step, called at {place}, has waited for it for {self.waited():.0f} s"
        return Diagnostic("CP0834", message, None, tuple(map(Note, (*notes[: 2 * _SHOWN], waits))))

    def _notice(self, now: float, waited: float, rank: int) -> None:
        """Print once which ranks have not reached the comparison."""
        silent = self._silent(now, rank)
        late = [f"rank {n} {self.processes[n].silence(self.processes[n].state)}" for n in silent]
        late += self.awaited("rank", {n: r for n, (_, r) in self._answered.items() if n not in silent})
        if not late:
            return
        self._is_reported = True
        text = f"commplan: the comparison of a step has waited for {waited:.0f} s: {'; '.join(late[:_SHOWN])}"
        print(f"{text}; {self.limit()}", file=sys.stderr, flush=True)


class _Listener:
    """The thread of this process that answers other ranks. It ends before MPI does."""

    def __init__(self) -> None:
        self.calls: dict[Key, RankCalls] = {}
        self.answers: dict[Key, dict[int, JointReport]] = {}
        # By rank of COMM_WORLD whose program has ended: the time of the message, and its last calls.
        self.departed: dict[int, tuple[float, Mapping[Key, tuple[int, str]]]] = {}
        self.heard: set[int] = set()  # The ranks of COMM_WORLD whose listeners run.
        self._sends: list[Any] = []
        self._sending = threading.Lock()  # The main thread and the listener both send.
        self._ended = threading.Event()
        self._tag = highest_tag() - 1
        self._thread = threading.Thread(target=self._run, name="commplan-steps", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        # A program may call MPI.Finalize itself. MPI first deletes the attributes of COMM_SELF.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=self._end), None)

    def add(self, calls: RankCalls) -> Key:
        ranks = digest(repr([*calls.numbers]))
        key = ranks, sum(other == ranks for other, _ in self.calls)
        self.calls[key] = calls
        return key

    def send(self, kind: str, key: Key, content: Any, ranks: Sequence[int]) -> None:
        with self._sending:
            self._sends = [send for send in self._sends if not send.Test()]
            self._sends += [MPI.COMM_WORLD.isend((kind, key, content), rank, self._tag) for rank in ranks]

    def _end(self, *_: Any) -> None:
        if not self._ended.is_set() and self.calls:
            calls = {key: (each.number, each.name) for key, each in self.calls.items()}
            ranks = {rank for each in self.calls.values() for rank in each.numbers}
            for rank in sorted(ranks - {int(MPI.COMM_WORLD.Get_rank())}):
                with contextlib.suppress(MPI.Exception):  # The rank may have died.
                    self.send("departed", next(iter(calls)), calls, [rank])
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        status = MPI.Status()
        while not self._ended.wait(_TICK_S):
            while (message := MPI.COMM_WORLD.improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
                source, (kind, key, content) = int(status.Get_source()), message.recv()
                calls = self.calls.get(key)
                self.heard.add(source)
                if kind == "departed":
                    self.heard.discard(source)
                    self.departed[source] = time.monotonic(), content
                elif calls is None:
                    continue
                elif kind == "ask":
                    report = calls.report(waits=calls.is_inside or calls.busy())
                    self.send("answer", key, report, [source])
                elif kind == "answer":
                    self.answers.setdefault(key, {})[source] = content
                elif calls.verdict is None:
                    calls.verdict = content
                    self._judge(calls)

    def _judge(self, calls: RankCalls) -> None:
        """End the job if this rank waits in a collective. A rank that compares raises the error itself."""
        if calls.comparison is None and calls.verdict is not None:
            print(CommplanError(calls.verdict), file=sys.stderr, flush=True)
            self._ended.wait(SETTLE_S)
            end_job(1)


_listeners: list[_Listener] = []


def _listener() -> _Listener:
    if not _listeners:
        _listeners.append(_Listener())
    return _listeners[0]
