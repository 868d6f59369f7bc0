"""One process of a system: waits for orders, carries them out, says how long they took.

    python -m bench.harness.worker SOCKET MODULE

MODULE has `connect() -> System`. Orders and answers are lines of JSON on a Unix socket. Before every
repetition a process says that it is ready and sleeps until the moment that the parent names, the same for all
of them: they share one clock, and no system's own barrier is part of the figures.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.work import Operation, System, Work, operand, wrong

# Before whatever else runs on the machine: the hosts of a cluster have their processors to themselves.
PRIORITY = -19
_SET_TIMER_SLACK = 29  # prctl's PR_SET_TIMERSLACK


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Do `work` `warm` times untimed, then `times` times."""

    work: Work
    times: int
    warm: int = 1


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Let go of all prepared operations and their buffers."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """End."""


Order = Measure | Forget | Quit


class Ready(msgspec.Struct, frozen=True, tag=True):
    """This rank waits for the next start."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """For each repetition the seconds and CPU seconds; the error, if any; the system's choice, if it makes
    one."""

    seconds: list[float] = []
    cpu: list[float] = []
    wrong: str = ""
    note: str = ""
    rank: int = -1


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The work cannot be done by this system; the reason."""

    reason: str


Answer = Ready | Done | Failed


class Start(msgspec.Struct, frozen=True, tag=True):
    """Begin the next repetition at `at` of the monotonic clock."""

    at: float


class Link:
    """The socket to the parent."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rb")

    def say(self, answer: Answer) -> None:
        self._socket.sendall(msgspec.json.encode(answer) + b"\n")

    def read(self, kind: Any) -> Any:
        line = self._lines.readline()
        if not line:
            sys.exit(0)  # the parent is gone, and with it the bench
        return msgspec.json.decode(line, type=kind)


class Worker:
    def __init__(self, system: System, link: Link) -> None:
        self._system = system
        self._link = link
        self._prepared: dict[Work, Operation] = {}

    def serve(self) -> None:
        self._link.say(Done(rank=self._system.rank))
        while True:
            match self._link.read(Order):
                case Measure() as order:
                    self._link.say(self._measure(order))
                case Forget():
                    self._prepared.clear()
                    gc.collect()
                    self._link.say(Done())
                case _:
                    return

    def _measure(self, order: Measure) -> Answer:
        work, system = order.work, self._system
        try:
            operation = self._prepared.get(work) or system.prepare(work)
        except NotImplementedError as error:
            return Failed(str(error))
        self._prepared[work] = operation
        seconds: list[float] = []
        cpu: list[float] = []
        problem = ""
        gc.disable()
        for repetition in range(-order.warm, order.times):
            variant = repetition % 2
            operation.fill(variant)
            self._wait()
            cpu_before, before = time.process_time(), time.perf_counter()
            operation.run()
            after, cpu_after = time.perf_counter(), time.process_time()
            problem = problem or wrong(work, operation.results(), system.rank, system.ranks, variant)
            if repetition >= 0:
                seconds.append(after - before)
                cpu.append(cpu_after - cpu_before)
        gc.enable()
        return Done(seconds, cpu, problem, operation.note)

    def _wait(self) -> None:
        self._link.say(Ready())
        start: Start = self._link.read(Start)
        time.sleep(max(0.0, start.at - time.monotonic()))


def operands(work: Work, rank: int, ranks: int) -> list[list[Any]]:
    """The operands of this rank: [variant][tensor]."""
    return [[operand(work, i, rank, ranks, variant) for i in range(len(work.counts))] for variant in (0, 1)]


def come_first() -> None:
    """Give this process, and threads that it will start, priority over the rest of the machine.

    Linux may share processors first between sessions and then between processes: so the session needs
    priority too, and must contain no other processes. Ranks of MPI already are in separate sessions, which
    they cannot leave. A lab needs root, so all of this is permitted.
    """
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with contextlib.suppress(PermissionError):
        os.setsid()
    with contextlib.suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text(str(PRIORITY), encoding="ascii")


def main() -> None:
    _, path, module = sys.argv
    come_first()
    link = Link(path)
    system: System = importlib.import_module(module).connect()
    # Otherwise the kernel may wake sleepers 50 microseconds late, and each of them by another time.
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    Worker(system, link).serve()
    sys.stdout.flush()
    os._exit(0)  # what libraries do at exit differs, may hang when peers are gone, and proves nothing here


if __name__ == "__main__":
    main()
