"""The sidecar: `python -m commplan.sidecar DESCRIPTOR`, started by `attend` with a socket that listens.

It imports little, and what reads records only where a process has died.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
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
_READ_MS = 1000  # to wait for who reads what is said
_QUIET_S = 0.1  # without another end, until it is said what those before mean


class Attended:
    """A process that introduces itself. number: that the kernel says it has. who: `rank 2`. descriptor,
    errors: a pidfd of it and its standard error, which it gives; else -1. ended: its wait status, once it
    has."""

    def __init__(self, line: socket.socket) -> None:
        self.line, (self.number, _) = line, peer(line)
        line.setblocking(False)
        self.who, self.descriptor, self.errors = "", -1, -1
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
                data, given, _, _ = socket.recv_fds(self.line, _LONGEST, 2)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if len(given) == 2 and self.descriptor < 0:
                self.descriptor, self.errors = given
            else:
                for descriptor in given:
                    os.close(descriptor)
            if not data:
                return False
            message = json.loads(data)
            if "who" in message:
                self.who = self.who or message["who"]
                self.records.append(Path(message["record"]))
                continue
            self.left = True
            if message:
                self._let_go()

    def _let_go(self) -> None:
        """It ends the job: some launchers do that when nobody holds its standard error any more."""
        if self.errors >= 0:
            os.close(self.errors)
            self.errors = -1
        with contextlib.suppress(OSError):
            self.line.send(b"{}")

    def close(self) -> None:
        self.line.close()
        for descriptor in (self.descriptor, self.errors):
            if descriptor >= 0:
                os.close(descriptor)


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
            if not self.running and not self.news and self.has_ended():
                return
            events = self.selector.select(None if self.running and not self.news else _QUIET_S)
            for key, _ in events:
                key.data()
            if not events:
                for process in self.news:
                    self.weigh(process)
                self.news.clear()

    def has_ended(self) -> bool:
        """Remove the socket, where nobody has come meanwhile."""
        with contextlib.suppress(TimeoutError), locked() as place:
            self.accept()
            if not self.running:
                (place / SOCKET).unlink(missing_ok=True)
                place.rmdir()
                return True
        return False

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self.listener.accept()
                if peer(line)[1] != os.getuid():
                    line.close()
                    continue
                process = Attended(line)
                self.running.append(process)
                self.selector.register(line, selectors.EVENT_READ, self._hearing(process))

    def _hearing(self, process: Attended) -> Callable[[], Any]:
        def hear() -> None:
            known, speaks = process.descriptor >= 0, process.hear()
            if not known and process.descriptor >= 0:
                self.selector.register(
                    process.descriptor, selectors.EVENT_READ, functools.partial(self.end, process)
                )
            if not speaks:
                with contextlib.suppress(KeyError, ValueError):  # it has ended in the same moment
                    self.selector.unregister(process.line)
                if process.descriptor < 0:  # it has not introduced itself
                    self.running.remove(process)
                    process.close()

        return hear

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
            from commplan.recorder.file import append_end  # noqa: PLC0415  it takes long to load

            for path in process.records:
                with contextlib.suppress(OSError, ValueError):
                    append_end(path, text, process.seconds)
            gone.append(process)
        after = self.news[self.news.index(process) + 1 :]
        if all(other.job != process.job for other in (*self.running, *after)):
            self._speak(self.gone.pop(process.job), process)
        process.close()

    def _speak(self, gone: list[Attended], last: Attended) -> None:
        """No process of a job is left: print why, if none of them has."""
        if not gone or last.errors < 0:
            return
        from commplan.recorder.last_words import last_words, read_jobs  # noqa: PLC0415

        # The first record of each is that of the job's first communicator or mesh.
        records = read_jobs(process.records[0] for process in gone)
        if text := last_words(records, last.who.split(" ")[0], kills_for_memory() - self.killed):
            say(last.errors, text)


def say(descriptor: int, text: str) -> None:
    """Write `text` to the standard error of a process that has died, unless nobody reads that."""
    data, poll = memoryview(text.encode()), select.poll()
    poll.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(_READ_MS):
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # so much does not block


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Sidecar(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
