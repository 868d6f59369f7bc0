"""The processes of one system, as the bench sees them."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Self

import msgspec

from bench.harness.work import Work
from bench.harness.worker import Answer, Done, Failed, Forget, Measure, Quit, Start
from bench.netlab import Lab
from commplan.diagnostics import fail

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds without a word from a process before the bench gives up
# Between naming the moment of a start and the moment itself: long enough for the word to reach everyone.
NOTICE = 0.0004


class Block(NamedTuple):
    """The measurements of one block of repetitions: for each repetition the seconds until the last rank was
    done, and the CPU seconds of all ranks; and the system's choice, if it makes one."""

    seconds: list[float]
    cpu: list[float]
    note: str


class Group:
    """A process of `module` on each host of `lab`, under mpirun or alone. Raises CP1124 if one fails."""

    def __init__(
        self, lab: Lab, module: str, *, mpi: bool, env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.module = module
        self._lab = lab
        self._folder = tempfile.TemporaryDirectory(prefix="commplan-bench-")
        self._path = str(Path(self._folder.name) / "socket")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._path)
        self._server.listen(len(lab.ranks))
        self._server.settimeout(1.0)
        self._log: IO[bytes] = (Path(self._folder.name) / "log").open("w+b")
        self._links: list[tuple[socket.socket, IO[bytes]]] = []
        self._processes = self._start(mpi, {**(env or {}), "PYTHONPATH": str(ROOT)}, options)

    def _start(
        self, mpi: bool, env: Mapping[str, str], options: Sequence[str]
    ) -> list[subprocess.Popen[bytes]]:
        words = [sys.executable, "-m", "bench.harness.worker", self._path, self.module]
        if not mpi:
            ranks = range(len(self._lab.ranks))
            return [self._lab.spawn(r, words, env=env, stdout=self._log, stderr=self._log) for r in ranks]
        command = self._lab.mpirun(words, options=options)
        # All ranks in a separate session: a rank that yields does so only to its session.
        return [
            subprocess.Popen(
                command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=self._log,
                stderr=self._log, start_new_session=True,
            )
        ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for link, lines in self._links:
            with contextlib.suppress(OSError):  # it may have ended already
                link.sendall(msgspec.json.encode(Quit()) + b"\n")
            lines.close()
            link.close()
        self._server.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
        self._folder.cleanup()

    def wait(self) -> None:
        """Wait until every rank is connected and has identified itself."""
        until = time.monotonic() + PATIENCE
        while len(self._links) < len(self._lab.ranks):
            try:
                link, _ = self._server.accept()
            except TimeoutError:
                if time.monotonic() > until or any(process.poll() for process in self._processes):
                    self._give_up("did not start")
                continue
            link.settimeout(PATIENCE)
            self._links.append((link, link.makefile("rb")))
        ranked = {self._read(link[1], Done).rank: link for link in self._links}
        self._links = [ranked[rank] for rank in sorted(ranked)]

    def measure(self, work: Work, times: int, warm: int = 1) -> Block | str:
        """A block of repetitions, every result checked; or the reason if the system cannot do the work."""
        self._tell(Measure(work, times, warm))
        for _ in range(warm + times):
            waiting = [self._read(lines, Answer) for _, lines in self._links]
            refused = [answer.reason for answer in waiting if isinstance(answer, Failed)]
            if refused:
                return refused[0]
            self._tell(Start(time.monotonic() + NOTICE))
        answers = [self._read(lines, Done) for _, lines in self._links]
        for answer in answers:
            if answer.wrong:
                fail("CP1125", f"{self.module} gave a wrong result for {work.kind} of {work.nbytes} bytes"
                     f"{f' ({work.how})' if work.how else ''}", answer.wrong)  # fmt: skip
        seconds = [max(ranks) for ranks in zip(*(answer.seconds for answer in answers), strict=True)]
        cpu = [math.fsum(ranks) for ranks in zip(*(answer.cpu for answer in answers), strict=True)]
        return Block(seconds, cpu, answers[0].note)

    def forget(self) -> None:
        """Let all ranks free their buffers."""
        self._tell(Forget())
        for _, lines in self._links:
            self._read(lines, Done)

    def _tell(self, order: Any) -> None:
        line = msgspec.json.encode(order) + b"\n"
        try:
            for link, _ in self._links:
                link.sendall(line)
        except OSError as error:
            self._give_up(f"ended: {error}")

    def _read(self, lines: IO[bytes], kind: Any) -> Any:
        try:
            line = lines.readline()
        except TimeoutError:
            self._give_up(f"said nothing for {PATIENCE:.0f} s")
        except OSError as error:
            self._give_up(f"ended: {error}")
        if not line:
            self._give_up("ended")
        answer = msgspec.json.decode(line, type=Answer)
        if kind is not Answer and not isinstance(answer, kind):
            self._give_up(f"answered {answer}")
        return answer

    def _give_up(self, reason: str) -> NoReturn:
        self._log.flush()
        output = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip()
        fail("CP1124", f"a process of {self.module} {reason}", *(output[-2000:].splitlines()[-20:]))
