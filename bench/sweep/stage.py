"""A sweep as its timetable says: programs started, killed and started again, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.input.cells import QUIET
from bench.input.team import MALLOC, MARK, cpu_s, path, pids_of
from bench.sweep.timetable import Asked, Member, timetable

LOOK_S = 0.02
SERVED = ("tensorsocket", "tf_service")
SHARED_MEMORY = {"commplan": "commplan-feed*", "tensorsocket": "torch_*"}  # files in /dev/shm, by system


class Program:
    """A started program, and what it has said. cpu_s: between `joined` and its end."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self.name, self.log = name, folder / f"{name}.txt"
        environment = {**os.environ, **MALLOC, **QUIET, "PYTHONPATH": path(), "TMPDIR": str(folder / "tmp")}
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self.said: dict[str, Any] = {}
        self.joined_ns = self.ended_ns = 0
        self.joined_cpu_s = self.ended_cpu_s = 0.0
        self.was_killed = False
        self._relay = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._relay.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            if not line.startswith(MARK):
                continue
            fields = json.loads(line[len(MARK) :])
            if "joined" in fields:
                self.joined_ns, self.joined_cpu_s = time.monotonic_ns(), fields["cpu"]
            if "ended" in fields:
                self.ended_ns, self.ended_cpu_s = time.monotonic_ns(), fields["cpu"]
            self.said |= fields

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def cpu_s(self) -> float:
        return max(0.0, self.ended_cpu_s - self.joined_cpu_s)

    @property
    def failure(self) -> str:
        """Why it ended that should not have; empty where it did as it should."""
        if "cannot" in self.said:
            return str(self.said["cannot"])
        if self.was_killed or self.is_running:
            return ""
        self._relay.join(10)  # its last words
        if "ended" in self.said:
            return ""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{self.name} ended with {self.process.returncode}: {lines[-1][:200] if lines else 'silent'}"

    def tell(self) -> None:
        """To end with its epoch."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write("end\n")
            self.process.stdin.close()

    def kill(self) -> None:
        self.was_killed, self.ended_cpu_s = True, cpu_s([self.process.pid])
        self.ended_ns = time.monotonic_ns()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._relay.join(10)

    def close(self) -> None:
        """What is left of its session is killed."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._relay.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


@dataclass
class Life:
    """A member from one start to its end. since, upto: batches of its log when it was started and ended."""

    member: Member
    program: Program
    since: int
    upto: int = 0


@dataclass
class Played:
    """What came of a sweep. kept: batches of a log that count, by member, where a kill lost some: those that
    its next life did not go on from. left: what was still there after the last program's end."""

    system: str
    members: list[Member]
    lives: list[Life] = field(default_factory=list[Life])
    kept: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    server_cpu_s: float = 0.0
    sockets: int = 0
    left: list[str] = field(default_factory=list[str])
    failed: str = ""
    folder: Path = Path()

    def log(self, member: Member) -> Path:
        return self.folder / f"{member.number:02d}.log"


@dataclass
class Stage:
    """Where a sweep of `system` is played. python_of: the interpreter of a kind. timeout: seconds for what
    should happen at once on a machine that has time for it."""

    system: str
    asked: Asked
    records: Path
    folder: Path
    python_of: Callable[[str], str]
    entry_nbytes: int
    timeout: float = 60.0
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def play(self) -> Played:
        (self.folder / "tmp").mkdir(parents=True)
        played = Played(self.system, timetable(self.asked), folder=self.folder)
        before, name = _shared_memory(self.system), f"sweep-{uuid.uuid4().hex[:12]}"
        self.options = {"name": name, "records": str(self.records), "timeout": self.timeout, **self.options}
        server: Program | None = None
        try:
            if self.system in SERVED:
                server = self._served()
            self._play(played)
        except TimeoutError as error:
            played.failed = str(error)
        finally:
            for life in played.lives:
                life.program.close()
            if server is not None:
                played.server_cpu_s = cpu_s(pids_of({server.process.pid})) - server.joined_cpu_s
                server.tell()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(10)
                server.close()
        played.left += _left(self.system, played, server, before, name)
        return played

    def _served(self) -> Program:
        command = [self.python_of("peer"), "-m", "bench.input.peers", self.system, "server", "--records",
                   str(self.records), "--members", "1", "--port", str(self.options["port"])]  # fmt: skip
        server = Program(command, self.folder, "server")
        _until(lambda: "port" in server.said or not server.is_running, self.timeout, "the server of it")
        server.joined_cpu_s = cpu_s(pids_of({server.process.pid}))
        if server.failure and not server.is_running:
            raise TimeoutError(server.failure)
        return server

    def _play(self, played: Played) -> None:
        begun = time.monotonic()
        waiting = list(played.members)
        dying = {member.number: member for member in played.members if member.dies is not None}
        back: dict[int, float] = {}
        until = begun + self.timeout + 3 * self.asked.minute
        while waiting or dying or back or time.monotonic() - begun < 1.1 * self.asked.minute:
            now = time.monotonic() - begun
            for member in [member for member in waiting if member.starts <= now]:
                waiting.remove(member)
                self._start(played, member)
            for life in played.lives:
                number, dies = life.member.number, life.member.dies
                if number in dying and dies is not None and dies <= now and self._may_die(played, life):
                    del dying[number]
                    self._kill(played, life)
                    if life.member.returns is not None:
                        back[number] = now + life.member.returns - dies
            for number in [number for number, moment in back.items() if moment <= now]:
                del back[number]
                self._start(played, played.members[number])
            self._look(played)
            if time.monotonic() > until:
                raise TimeoutError("it did not come to the end of its timetable")
            time.sleep(LOOK_S)
        _until(lambda: self._look(played) and all(map(self._has_begun(played), played.lives)), self.timeout,
               "a program that was to begin")  # fmt: skip
        running = [life for life in played.lives if life.program.is_running]
        played.sockets = sum(_sockets(life.program.process.pid) for life in running)
        for life in running:
            life.program.tell()
        _until(lambda: self._look(played) and not any(life.program.is_running for life in running),
               self.timeout, "a program that was to end")  # fmt: skip
        for life in running:
            life.program.close()
            life.upto = self._given(played, life.member)
        self._look(played)

    def _look(self, played: Played) -> bool:
        for life in played.lives:
            if life.program.failure:
                raise TimeoutError(life.program.failure)
        return True

    def _start(self, played: Played, member: Member) -> None:
        since = self._given(played, member)
        options = {**self.options, "system": self.system, "kind": member.kind, "number": member.number,
                   "log": str(played.log(member))}  # fmt: skip
        python = self.python_of("peer" if self.system in SERVED else member.kind)
        command = [python, "-m", "bench.sweep.program", json.dumps(options)]
        lives = sum(life.member is member for life in played.lives)
        program = Program(command, self.folder, f"{member.number:02d}-{lives}")
        played.lives.append(Life(member, program, since))

    def _kill(self, played: Played, life: Life) -> None:
        life.program.kill()
        life.upto = self._given(played, life.member)
        saved = played.log(life.member).with_suffix(".json")
        if saved.exists() and life.member.returns is not None:
            played.kept[life.member.number] = json.loads(saved.read_text())["given"], life.upto

    def _may_die(self, played: Played, life: Life) -> bool:
        if self.system == "commplan":
            return played.log(life.member).with_suffix(".json").exists()
        return self._given(played, life.member) > 0

    def _has_begun(self, played: Played) -> Callable[[Life], bool]:
        return lambda life: bool(life.upto) or self._given(played, life.member) > life.since

    def _given(self, played: Played, member: Member) -> int:
        log = played.log(member)
        return log.stat().st_size // self.entry_nbytes if log.exists() else 0


def _until(enough: Callable[[], bool], seconds: float, event: str) -> None:
    end = time.monotonic() + seconds
    while not enough():
        if time.monotonic() > end:
            raise TimeoutError(f"{event} did not do so in {seconds:g} s")
        time.sleep(LOOK_S)


# --- what is left ---


def _shared_memory(system: str) -> set[str]:
    return {str(file) for file in Path("/dev/shm").glob(SHARED_MEMORY.get(system, "-"))}


def _sockets(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += str(entry.readlink()).startswith("socket:")
    return count


def _left(
    system: str, played: Played, server: Program | None, before: set[str], name: str
) -> list[str]:  # fmt: skip
    """What is there though all have ended."""
    from commplan.runtime.input.ring import meeting  # noqa: PLC0415

    programs = [life.program for life in played.lives] + ([server] if server else [])
    left = [f"process {pid}" for pid in pids_of({program.process.pid for program in programs})]
    left += [f"temporary file {file.name}" for file in (played.folder / "tmp").rglob("*")]
    if system == "commplan":
        left += [f"memory {feed.name}" for feed in meeting.found(name)]
    end = time.monotonic() + 2.0
    while (fresh := _shared_memory(system) - before) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return left + sorted(fresh)


def own_work(
    kinds: set[str], python_of: Callable[[str], str], folder: Path, rows: int, batches: int
) -> Mapping[str, float]:
    """CPU seconds a record of a member's own work, by kind: on batches that lie in memory."""
    seconds: dict[str, float] = {}
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    for kind in sorted(kinds):
        options = {"system": "own_work", "kind": kind, "log": str(folder / kind), "batches": batches,
                   "step_s": 0.0}  # fmt: skip
        command = [python_of(kind), "-m", "bench.sweep.program", json.dumps(options)]
        program = Program(command, folder, kind)
        try:
            _until(lambda program=program: not program.is_running, 120.0, f"a program of {kind}")
        finally:
            program.close()
        if program.failure:
            raise SystemExit(program.failure)
        seconds[kind] = program.cpu_s / (rows * batches)
    return seconds
