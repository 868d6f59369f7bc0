"""The processes of one system: started, driven epoch by epoch, measured from outside.

A worker prints lines that begin with `@` and are JSON: one when it is ready, one after each epoch. It runs an
epoch for every line on its standard input and ends with it. CPU is the user and system time of all processes
in the sessions of the workers, including servers and their children, by the kernel's clocks; memory is the
kernel's count, with shared pages counted once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "@"
END_S = 10.0  # for members to exit normally
# glibc's own thresholds cost Pillow hundreds of page faults a record, in some runs and not in others:
# everything is measured under one setting.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}
Answer = dict[str, Any]


class StalledError(Exception):
    """A system that does not answer, or whose process has ended; the message has its name and its last
    output."""


@dataclass(frozen=True)
class Block:
    """One epoch of all members. cpu_s: of all processes. wall_s: until the last one had its last record."""

    cpu_s: float
    wall_s: float
    answers: list[Answer]

    @property
    def records(self) -> int:
        """Of all members."""
        return sum(answer["records"] for answer in self.answers)

    @property
    def cpu_per_record(self) -> float:
        """Seconds per record and member."""
        return self.cpu_s / self.records


@dataclass
class _Process:
    process: subprocess.Popen[str]
    name: str
    log: Path
    lines: queue.Queue[Answer | None] = field(default_factory=queue.Queue["Answer | None"])

    def relay(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith(MARK):
                self.lines.put(json.loads(line[len(MARK) :]))
        self.lines.put(None)


def path() -> str:
    """The module search path of the processes: this folder first, then that of this process."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class Team:
    """`commands` are started on the `cores`; those in `members` answer, the others serve them."""

    def __init__(
        self,
        servers: Sequence[Sequence[str]],
        members: Sequence[Sequence[str]],
        *,
        cores: Sequence[int],
        folder: Path,
        timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout = timeout
        self._cores = set(cores)
        self._folder = folder
        self._environment = {**os.environ, **MALLOC, "PYTHONPATH": path(), **(environment or {})}
        self._all: list[_Process] = []
        self.members: list[_Process] = []
        try:
            for number, command in enumerate(servers):
                server = self._start(command, f"server-{number}")
                self._answer(server)
            self.members = [self._start(command, f"member-{n}") for n, command in enumerate(members)]
            self.first = [self._answer(member) for member in self.members]
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str], name: str) -> _Process:
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{name}.log"
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)  # inherited by processes started now
        try:
            with log.open("w") as errors:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=self._environment,
                    start_new_session=True,
                )
        finally:
            os.sched_setaffinity(0, before)
        started = _Process(process, name, log)
        threading.Thread(target=started.relay, args=(process.stdout,), daemon=True).start()
        self._all.append(started)
        return started

    def _answer(self, process: _Process) -> Answer:
        try:
            line = process.lines.get(timeout=self.timeout)
        except queue.Empty:
            raise StalledError(f"{process.name} was silent for {self.timeout:g} s") from None
        if line is None:
            output = process.log.read_text(errors="replace").strip().splitlines()
            raise StalledError(f"{process.name} ended: {output[-1][:200] if output else 'without a word'}")
        if "cannot" in line:
            raise StalledError(str(line["cannot"]))
        return line

    def block(self) -> Block:
        """One epoch. Raises StalledError."""
        pids = self._pids()
        before, start = cpu_s(pids), time.perf_counter()
        for member in self.members:
            assert member.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_answer` says what became of it
                member.process.stdin.write("go\n")
                member.process.stdin.flush()
        answers = [self._answer(member) for member in self.members]
        wall = max(answer["ended"] for answer in answers) - start
        return Block(cpu_s(pids) - before, wall, answers)

    def memory(self) -> tuple[int, int]:
        """Bytes of all processes: with shared pages counted once, and of private pages alone."""
        shared = private = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                kilobytes = dict(line.split(":", 1) for line in text.splitlines()[1:])
                shared += _kib(kilobytes["Pss"])
                private += _kib(kilobytes["Private_Clean"]) + _kib(kilobytes["Private_Dirty"])
        return shared, private

    def _pids(self) -> list[int]:
        return pids_of({member.process.pid for member in self._all})

    def close(self) -> None:
        """End all processes: first by the end of their input, then by force."""
        for member in self._all:
            with contextlib.suppress(OSError, ValueError):
                if member.process.stdin is not None:
                    member.process.stdin.close()
        until = time.monotonic() + END_S
        for member in reversed(self._all):
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.1, until - time.monotonic()))
        for member in self._all:
            with contextlib.suppress(OSError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.wait()
            if member.process.stdout is not None:
                member.process.stdout.close()


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * 1024


def pids_of(sessions: Set[int]) -> list[int]:
    """The processes of `sessions`."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) in sessions:
                    pids.append(int(entry.name))
    return pids


def cpu_s(pids: Sequence[int]) -> float:
    """User and system seconds of processes, by the CPU-time clock that Linux has for each."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)
    return total


# --- the workers' side ---


def member_parser(summary: str | None, systems: Sequence[str]) -> argparse.ArgumentParser:
    """The flags of a process of a system."""
    parser = argparse.ArgumentParser(description=(summary or "").splitlines()[0])
    parser.add_argument("system", choices=systems)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--place", type=int, default=0)
    parser.add_argument("--run-id", default="")
    return parser


def serve(**fields: Any) -> None:
    """A server is up; stay until the input ends."""
    say(**fields)
    sys.stdin.read()


def answer(epoch: Any, **ready: Any) -> None:
    """Report that this member is ready; then for every line of the input print the result of `epoch`."""
    say(**ready)
    for _ in sys.stdin:
        reply: Answer = epoch()
        say(ended=time.perf_counter(), **reply)


def cannot(why: str) -> None:
    """Say why this system cannot run here."""
    say(cannot=why)


def say(**fields: Any) -> None:
    """Print a line for the parent process."""
    print(f"{MARK}{json.dumps(fields)}", flush=True)
