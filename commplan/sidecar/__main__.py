"""The sidecar: `python -m commplan.sidecar LISTENER MAIL`, started by `attend` with two sockets.

It imports the readers of records only if a process is watched or has died.
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
from typing import TYPE_CHECKING, Any

from commplan.sidecar.attend import PORT, SOCKET, locked, own_address, peer
from commplan.sidecar.ending import described, kills_for_memory, status

if TYPE_CHECKING:
    from commplan.sidecar.observer import Observer

_LONGEST = 65536  # bytes of a message
_READ_MS = 1000  # to wait until standard error is read
_QUIET_S = 0.1  # without another end, before the ends so far are evaluated
_LATEST_S = 1.0  # after an end, even if messages keep arriving
_TICK_S = 0.25  # between two looks at processes that are watched


class Attended:
    """A process that introduces itself.

    Attributes:
        number: Its process number according to the kernel.
        who: Such as `rank 2`.
        job: The name of its first job.
        descriptor, errors: A pidfd of it and its standard error, which it sends; -1 before.
        ended: Its wait status once it has ended; `seconds`: when, on `time.monotonic`.
        stack, queried_at: See `states.AttendedProcess`.

    Args:
        line: The connection to the process.
        sidecar: Receives the messages of the process that concern its job.
    """

    def __init__(self, line: socket.socket, sidecar: Sidecar) -> None:
        self.line, (self.number, _) = line, peer(line)
        line.setblocking(False)
        self.sidecar = sidecar
        self.who, self.job, self.stack, self.descriptor, self.errors = "", "", "", -1, -1
        self.records: list[Path] = []
        self.has_left = False
        self.ended: int | None = None
        self.seconds = self.queried_at = 0.0

    def hear(self) -> bool:
        """Receive messages. Returns False once the process has closed the connection."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.line, _LONGEST, 3)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if len(descriptors) >= 2 and self.descriptor < 0:
                self.descriptor, self.errors, *descriptors = descriptors
            if not data:
                return False
            with contextlib.suppress(ValueError):  # a message that was too long
                self._take(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Take a message. The open record is removed from `descriptors` if it is used."""
        if "stack" in message:
            self.stack, self.queried_at = message["stack"], 0.0
        elif "over" in message:
            self.sidecar.unwatch(Path(message["over"]))
        elif "hosts" in message:
            self.sidecar.add_hosts(Path(message["record"]), message["hosts"])
        elif "who" in message:
            record, job = Path(message["record"]), message["job"] or job_of(Path(message["record"]))
            self.who, self.job = self.who or message["who"], self.job or job
            self.records.append(record)
            if message["watched"]:
                who, members = message["who"].split(" ")[0], tuple(message["members"])
                self.sidecar.watch(job, record, self, who, members, descriptors.pop() if descriptors else -1)
        else:
            self.has_left = True
            if message:
                self._let_go()

    def ask_stack(self) -> None:
        """Ask for the Python of its main thread. It does not answer while a thread keeps the lock."""
        if not self.queried_at:
            self.queried_at, self.stack = time.monotonic(), ""
            with contextlib.suppress(OSError):
                self.line.send(b"stack")

    def say(self, text: str) -> None:
        """Print `text` to its standard error."""
        if self.errors >= 0:
            say(self.errors, text)

    def _let_go(self) -> None:
        """Close its standard error: some launchers end a job only once no process holds it."""
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
    """The sidecar of all processes of this user on this host."""

    def __init__(self, listener: socket.socket, mail: socket.socket) -> None:
        self.listener, self.mail = listener, mail
        self.address = own_address()
        self.observer: Observer | None = None
        self.selector = selectors.DefaultSelector()
        self.running: list[Attended] = []
        self.unreported: dict[str, list[Attended]] = {}  # of jobs that still run: without a report
        self.news: list[Attended] = []  # processes that have just ended
        self.killed = kills_for_memory()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(mail, selectors.EVENT_READ, self.receive)

    def receive(self) -> None:
        """Receive messages of other sidecars."""
        from commplan.sidecar.mail import received  # noqa: PLC0415  it takes long to load

        messages = list(received(self.mail, self.address.key))
        if self.observer is not None:
            self.observer.take(messages)

    def watch(
        self, job: str, record: Path, process: Attended, who: str, members: tuple[int, ...], descriptor: int
    ) -> None:
        """Find the rank that blocks the others of this record's job, while it runs.

        Args:
            descriptor: the open record, whose file may have been removed; -1 if the process sent none.
        """
        from commplan.sidecar import mail, observer  # noqa: PLC0415

        if self.observer is None:
            self.observer = observer.Observer(functools.partial(mail.send, self.mail), self.address)
        self.observer.add(job, record, process, who, members, descriptor)

    def unwatch(self, record: Path) -> None:
        if self.observer is not None:
            self.observer.remove(record)

    def add_hosts(self, record: Path, hosts: list[Any]) -> None:
        """Add the sidecars of other hosts to a job."""
        from commplan.sidecar.mail import Address  # noqa: PLC0415

        if self.observer is not None:
            rows = {tuple(ranks): Address(host, port, key, tuple(at)) for ranks, host, port, key, at in hosts}
            self.observer.add_hosts(record, rows)

    def run(self) -> None:
        """Run until the last process has ended."""
        self.accept()
        looked = 0.0
        while True:
            if not self.running and not self.news and self.has_ended():
                return
            is_watching = self.observer is not None and bool(self.observer.jobs)
            events = self.selector.select(_QUIET_S if self.news else _TICK_S if is_watching else None)
            for key, _ in events:
                key.data()
            if self.observer is not None and time.monotonic() >= looked + _TICK_S:
                looked = time.monotonic()
                self.observer.look()
            if not events or any(time.monotonic() > process.seconds + _LATEST_S for process in self.news):
                for process in self.news:
                    self.weigh(process)
                self.news.clear()

    def has_ended(self) -> bool:
        """Remove the sockets, unless a process has just connected."""
        with contextlib.suppress(TimeoutError), locked() as place:
            self.accept()
            if not self.running:
                for name in (SOCKET, PORT):
                    (place / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # a sidecar of another version uses the folder
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
                process = Attended(line, self)
                self.running.append(process)
                self.selector.register(line, selectors.EVENT_READ, self._hearing(process))

    def _hearing(self, process: Attended) -> Callable[[], Any]:
        def hear() -> None:
            is_introduced, speaks = process.descriptor >= 0, process.hear()
            if not is_introduced and process.descriptor >= 0:
                self.selector.register(
                    process.descriptor, selectors.EVENT_READ, functools.partial(self.end, process)
                )
            if not speaks:
                with contextlib.suppress(KeyError, ValueError):  # it has ended at the same time
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
        """Add its end to the records of a process, unless it has reported the end itself."""
        unreported = self.unreported.setdefault(process.job, [])
        if not process.has_left and (text := described(process.ended)):
            from commplan.recorder.file import append_end  # noqa: PLC0415  it takes long to load

            for path in process.records:
                with contextlib.suppress(OSError, ValueError):
                    append_end(path, text, process.seconds)
            unreported.append(process)
        after = self.news[self.news.index(process) + 1 :]
        if all(other.job != process.job for other in (*self.running, *after)):
            self._speak(self.unreported.pop(process.job), process)
        if self.observer is not None:
            self.observer.drop(self.running)
        process.close()

    def _speak(self, unreported: list[Attended], last: Attended) -> None:
        """Print why a job without running processes ended, if none of them has reported it."""
        if not unreported or last.errors < 0:
            return
        from commplan.recorder.last_words import last_words, read_jobs  # noqa: PLC0415

        # The first record of each process belongs to the job's first communicator or mesh.
        records = read_jobs(process.records[0] for process in unreported)
        if text := last_words(records, last.who.split(" ")[0], kills_for_memory() - self.killed):
            say(last.errors, text)


def job_of(record: Path) -> str:
    """The name of a record's job, see `recorder.file.path_of`."""
    return record.name.split(".")[0].rpartition("-")[2]


def say(descriptor: int, text: str) -> None:
    """Write `text` to the standard error of a process that has died, if its pipe is read."""
    data, poll = memoryview(text.encode()), select.poll()
    poll.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(_READ_MS):
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # does not block


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Sidecar(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])).run()


if __name__ == "__main__":
    main()
