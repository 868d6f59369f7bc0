"""The sidecar: `python -m commplan.sidecar LISTENER MAIL`, started by `attend` with two sockets.

It imports the readers of records only if a process is watched or has died.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commplan.sidecar.attend import PORT, SOCKET, locked, own_address, peer
from commplan.sidecar.ending import described, kills_for_memory, status
from commplan.sidecar.process import AttendedProcess

if TYPE_CHECKING:
    from commplan.sidecar.observer import Observer

_QUIET_S = 0.1  # until recorded ends are evaluated, if no process ends meanwhile
_LATEST_S = 1.0  # until recorded ends are evaluated, even if further messages arrive
_TICK_S = 0.25  # between two evaluations of watched processes


class Sidecar:
    """The sidecar of all processes of this user on this host."""

    def __init__(self, listener: socket.socket, mail: socket.socket) -> None:
        self.listener, self.mail = listener, mail
        self.address = own_address()
        self.observer: Observer | None = None
        self.selector = selectors.DefaultSelector()
        self.running: list[AttendedProcess] = []
        self.unreported: dict[str, list[AttendedProcess]] = {}  # ended processes, by job that still runs
        self.news: list[AttendedProcess] = []  # processes that have just ended
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

    def take(self, process: AttendedProcess, message: dict[str, Any], descriptors: list[int]) -> None:
        """Take a message of a process about a job. The open record is removed from `descriptors` if used."""
        record, observer = Path(message["record"]), self.observer
        if "who" in message:
            # The name of the file contains the job, see `recorder.file.path_of`.
            job = message["job"] or record.name.split(".")[0].rpartition("-")[2]
            process.who, process.job = process.who or message["who"], process.job or job
            process.records.append(record)
            if message["watched"]:  # find the rank that blocks the others while the job runs
                who, members = message["who"].split(" ")[0], tuple(message["members"])
                opened = descriptors.pop() if descriptors else -1  # its file may have been removed
                self._watching().add(job, record, process, who, members, opened)
        elif observer is not None and "hosts" in message:
            from commplan.sidecar.mail import Address  # noqa: PLC0415

            rows = message["hosts"]
            hosts = {tuple(ranks): Address(host, port, key, tuple(at)) for ranks, host, port, key, at in rows}
            observer.add_hosts(record, hosts)
        elif observer is not None:
            observer.remove(record)

    def _watching(self) -> Observer:
        from commplan.sidecar import mail, observer  # noqa: PLC0415

        if self.observer is None:
            self.observer = observer.Observer(functools.partial(mail.send, self.mail), self.address)
        return self.observer

    def run(self) -> None:
        """Run until the last process has ended."""
        self.accept()
        looked = 0.0
        while True:
            if not self.running and not self.news and self.has_ended():
                return
            is_idle = bool(self.running) and (self.observer is None or not self.observer.jobs)
            events = self.selector.select(_QUIET_S if self.news else None if is_idle else _TICK_S)
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
                process = AttendedProcess(line, self.take)
                self.running.append(process)
                self.selector.register(line, selectors.EVENT_READ, functools.partial(self.hear, process))

    def hear(self, process: AttendedProcess) -> None:
        is_introduced, speaks = process.descriptor >= 0, process.hear()
        if not is_introduced and process.descriptor >= 0:
            end = functools.partial(self.end, process)
            self.selector.register(process.descriptor, selectors.EVENT_READ, end)
        if not speaks:
            with contextlib.suppress(KeyError, ValueError):  # it has ended at the same time
                self.selector.unregister(process.line)
            if process.descriptor < 0:  # it has not introduced itself
                self.running.remove(process)
                process.close()

    def end(self, process: AttendedProcess) -> None:
        process.seconds, process.ended = time.monotonic(), status(process.number, process.descriptor)
        process.hear()
        for file in (process.line, process.descriptor):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(file)
        self.running.remove(process)
        self.news.append(process)

    def weigh(self, process: AttendedProcess) -> None:
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

    def _speak(self, unreported: list[AttendedProcess], last: AttendedProcess) -> None:
        """Print why a job without running processes ended, if none of them has reported it."""
        if not unreported or last.errors < 0:
            return
        from commplan.recorder.last_words import last_words, read_jobs  # noqa: PLC0415

        # The first record of each process belongs to the job's first communicator or mesh.
        records = read_jobs(process.records[0] for process in unreported)
        if text := last_words(records, last.who.split(" ")[0], kills_for_memory() - self.killed):
            last.say(text)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each process has several descriptors here
    Sidecar(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])).run()


if __name__ == "__main__":
    main()
