"""The sidecar: `python -m commplan.sidecar DESCRIPTOR`, started by `attend` with a socket that listens.

It imports little, and what reads records only where a process has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commplan.sidecar.attend import SOCKET, locked, peer
from commplan.sidecar.ending import described, kills_for_memory, status

_LONGEST = 65536  # bytes of a message
_QUIET_S = 0.1  # without another end, until it is said what those before mean


class Attended:
    """A process that has introduced itself. number: that the kernel says it has. who: `rank 2`. errors: its
    standard error. descriptor: a pidfd. ended: its wait status, once it has."""

    def __init__(self, line: socket.socket) -> None:
        self.line, (self.number, _) = line, peer(line)
        line.setblocking(False)
        self.descriptor = os.pidfd_open(self.number)
        self.who, self.errors = "", -1
        self.records: list[Path] = []
        self.left = False
        self.ended: int | None = None
        self.seconds = 0.0  # when it ended, on `time.monotonic`

    @property
    def job(self) -> str:
        """What the records of a job's first communicator or mesh have in common."""
        return str(self.records[0]).rpartition("/")[2].split(".")[0] if self.records else ""

    def hear(self) -> bool:
        """Take in what it says; False where its end of the line is closed."""
        while True:
            try:
                data, given, _, _ = socket.recv_fds(self.line, _LONGEST, 1)
            except BlockingIOError:
                return True
            except OSError:
                return False
            for descriptor in given:
                if self.errors < 0:
                    self.errors = descriptor
                else:
                    os.close(descriptor)
            if not data:
                return False
            message = json.loads(data)
            self.left = not message
            if message:
                self.who = self.who or message["who"]
                self.records.append(Path(message["record"]))

    def close(self) -> None:
        self.line.close()
        os.close(self.descriptor)
        if self.errors >= 0:
            os.close(self.errors)


class Sidecar:
    """Of all processes of this user on this host."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.running: list[Attended] = []
        self.gone: dict[str, list[Attended]] = {}  # of jobs of which some still run: those without a word
        self.news: list[Attended] = []  # that have just ended
        self.killed = kills_for_memory()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)

    def run(self) -> None:
        """Until the last one has gone."""
        self.accept()
        while True:
            if not self.running and not self.news:
                with locked() as place:
                    self.accept()
                    if not self.running:
                        (place / SOCKET).unlink(missing_ok=True)
                        place.rmdir()
                        return
            events = self.selector.select(_QUIET_S if self.news else None)
            for key, _ in events:
                key.data()
            if not events:
                for process in self.news:
                    self.weigh(process)
                self.news.clear()

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self.listener.accept()
                try:
                    process = Attended(line) if peer(line)[1] == os.getuid() else None
                except OSError:  # it has gone, or is in another name space
                    process = None
                if process is None:
                    line.close()
                    continue
                self.running.append(process)
                self.selector.register(line, selectors.EVENT_READ, self._hearing(process))
                self.selector.register(process.descriptor, selectors.EVENT_READ, self._ending(process))

    def _hearing(self, process: Attended) -> Callable[[], Any]:
        def hear() -> None:
            if not process.hear():
                with contextlib.suppress(KeyError, ValueError):  # it has ended in the same moment
                    self.selector.unregister(process.line)

        return hear

    def _ending(self, process: Attended) -> Callable[[], Any]:
        return lambda: self.end(process)

    def end(self, process: Attended) -> None:
        process.seconds, process.ended = time.monotonic(), status(process.number, process.descriptor)
        process.hear()
        for file in (process.line, process.descriptor):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(file)
        self.running.remove(process)
        self.news.append(process)

    def weigh(self, process: Attended) -> None:
        """Put into its records how it ended, if it has not said that it does."""
        gone = self.gone.setdefault(process.job, [])
        if not process.left and (text := described(process.ended)):
            from commplan.sidecar.judgement import note  # noqa: PLC0415  it takes long to load

            note(process.records, text)
            gone.append(process)
        after = self.news[self.news.index(process) + 1 :]
        if all(other.job != process.job for other in (*self.running, *after)):
            self._judge(self.gone.pop(process.job), process)
        process.close()

    def _judge(self, gone: list[Attended], last: Attended) -> None:
        """Nobody of a job is left: say what nobody has said."""
        if not gone or last.errors < 0:
            return
        from commplan.sidecar.judgement import Ended, judgement  # noqa: PLC0415

        ends = [Ended(each.number, each.who, each.ended, each.seconds, tuple(each.records)) for each in gone]
        text = judgement(ends, kills_for_memory() - self.killed)
        if text:
            with contextlib.suppress(OSError):
                os.write(last.errors, text.encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    Sidecar(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
