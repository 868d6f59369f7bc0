"""How far other ranks are with the steps that all call together, asked over MPI while a step is compared.

A thread of each rank answers, since the main thread may wait in a collective. If a rank finds that another
one runs the step that it compares, it sends the error to all others and raises it, and they end the job.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from commplan.diagnostics import CommplanError
from commplan.lowering.mpi.job.rendezvous import highest_tag
from commplan.lowering.mpi.typing_shim import MPI
from commplan.runtime.observe.abort_hook import end_job
from commplan.runtime.observe.joint_calls import SETTLE_S, JointCalls, JointReport

_TICK_S = 0.1
_END_S = 10.0  # for the listener to end, before MPI does
_NOTICE_S = 10.0  # until a rank that keeps others waiting is named
Key = tuple[tuple[int, ...], int]  # the ranks in COMM_WORLD, and which of their programs


class RankCalls(JointCalls):
    """Those of the ranks `numbers` of `comm`, all of which make one. busy: whether a collective runs here."""

    def __init__(self, comm: Any, numbers: Sequence[int], busy: Any) -> None:
        super().__init__()
        world = comm.Get_group().Translate_ranks(list(numbers), MPI.COMM_WORLD.Get_group())
        self.numbers = dict(zip(map(int, world), numbers, strict=True))
        self.busy = busy
        self.verdict = ""
        self.key = _listener().add(self)
        self._asked, self._is_said = 0.0, False

    def look(self, waited: float) -> None:
        if waited < SETTLE_S or time.monotonic() < self._asked + SETTLE_S:
            return
        listener, rank = _listener(), int(MPI.COMM_WORLD.Get_rank())
        answers = dict(listener.answers.pop(self.key, {}))  # the listener may still add one
        reports = {self.numbers[world]: report for world, report in answers.items()}
        others = [world for world in self.numbers if world != rank]
        if (diagnostic := self.disagreement(reports)) is not None:
            listener.send("verdict", self.key, str(CommplanError(diagnostic)), others)
            time.sleep(SETTLE_S / 2)  # others print it before this rank ends
            raise CommplanError(diagnostic)
        if waited > _NOTICE_S and not self._is_said:
            self._is_said = True
            self._notice(waited, reports)
        self._asked = time.monotonic()
        listener.send("ask", self.key, rank, others)

    def _notice(self, waited: float, reports: dict[int, JointReport]) -> None:
        late = {n: report for n, report in reports.items() if not report.is_ahead} or reports
        places = [f"rank {n} is at {report.place or 'an unknown line'}" for n, report in sorted(late.items())]
        text = f"commplan: the comparison of a step has waited for {waited:.0f} s: {'; '.join(places[:4])}"
        print(text, file=sys.stderr, flush=True)


class _Listener:
    """Of this process. It ends before MPI does."""

    def __init__(self) -> None:
        self.calls: dict[Key, RankCalls] = {}
        self.answers: dict[Key, dict[int, JointReport]] = {}
        self._sends: list[Any] = []
        self._sending = threading.Lock()  # the main thread sends, and the listener
        self._ended = threading.Event()
        self._tag = highest_tag() - 1
        self._thread = threading.Thread(target=self._run, name="commplan-steps", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        # A program may call `MPI.Finalize` itself. It first deletes the attributes of COMM_SELF.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=self._end), None)

    def add(self, calls: RankCalls) -> Key:
        ranks = tuple(calls.numbers)
        key = ranks, sum(other == ranks for other, _ in self.calls)
        self.calls[key] = calls
        return key

    def send(self, kind: str, key: Key, content: Any, ranks: Sequence[int]) -> None:
        with self._sending:
            self._sends = [send for send in self._sends if not send.Test()]
            self._sends += [MPI.COMM_WORLD.isend((kind, key, content), rank, self._tag) for rank in ranks]

    def _end(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        status = MPI.Status()
        while not self._ended.wait(_TICK_S):
            while (message := MPI.COMM_WORLD.improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
                source, (kind, key, content) = int(status.Get_source()), message.recv()
                calls = self.calls.get(key)
                if calls is None:
                    continue
                if kind == "ask":
                    report = calls.report(waits=calls.is_inside or calls.busy())
                    self.send("answer", key, report, [source])
                elif kind == "answer":
                    self.answers.setdefault(key, {})[source] = content
                elif not calls.verdict:
                    calls.verdict = content
                    self._judge(calls)

    def _judge(self, calls: RankCalls) -> None:
        """A rank that waits in a collective cannot go on. One that compares finds the same by itself."""
        if calls.comparison is None:
            print(calls.verdict, file=sys.stderr, flush=True)
            self._ended.wait(SETTLE_S)
            end_job(1)


_listeners: list[_Listener] = []


def _listener() -> _Listener:
    if not _listeners:
        _listeners.append(_Listener())
    return _listeners[0]
