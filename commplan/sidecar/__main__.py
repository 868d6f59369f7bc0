"""The process of the sidecar: `python -m commplan.sidecar LISTENER MAIL`.

`sidecar.attend` starts it with the descriptors of two sockets: one accepts connections of processes, the
other receives datagrams of other sidecars. It imports the readers of records only if a process is watched or
has died, because they take long to load.
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

_QUIET_S = 0.1  # seconds without messages after which ends of processes are evaluated
_LATEST_S = 1.0  # seconds after the end of a process until it is evaluated, even if further messages arrive
_TICK_S = 0.25  # seconds between two evaluations of watched processes


class Sidecar:
    """The sidecar of all processes of this user on this host.

    Attributes:
        address: The address of this sidecar for other sidecars.
        observer: The watched jobs; None before the first one.
        selector: Calls the function for each socket and process that has an event.
        running: The connected processes that have not ended.
        unreported: By job with a running process, the processes that have died without a report.
        news: The processes that have ended and are not evaluated yet, in order of their end.
        killed: The result of `kills_for_memory` when the sidecar started.

    Args:
        listener: A listening Unix socket, to which processes connect.
        mail: A socket for datagrams of other sidecars.

    Raises:
        OSError: If the file with the port and the key of this sidecar cannot be read.
        ValueError: If this file is damaged.
    """

    def __init__(self, listener: socket.socket, mail: socket.socket) -> None:
        self.listener, self.mail = listener, mail
        self.address = own_address()
        self.observer: Observer | None = None
        self.selector = selectors.DefaultSelector()
        self.running: list[AttendedProcess] = []
        self.unreported: dict[str, list[AttendedProcess]] = {}
        self.news: list[AttendedProcess] = []
        self.killed = kills_for_memory()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(mail, selectors.EVENT_READ, self.receive)

    def receive(self) -> None:
        """Receive the messages of other sidecars that have arrived."""
        from commplan.sidecar.mail import received  # noqa: PLC0415  it takes long to load

        messages = list(received(self.mail, self.address.key))
        if self.observer is not None:
            self.observer.receive(messages)

    def handle_record(
        self, process: AttendedProcess, message: dict[str, Any], descriptors: list[int]
    ) -> None:
        """Handle a message of a process about a record: a new record, sidecars of other hosts, or its end.

        Args:
            process: The sender.
            message: A message with `record`, see `attend`, `introduce_hosts` and `unwatch`.
            descriptors: The open record if it is watched. Removed from the list if it is used.
        """
        record, observer = Path(message["record"]), self.observer
        if "who" in message:
            # The name of the file contains the job, see `recorder.file.path_of`.
            job = message["job"] or record.name.split(".")[0].rpartition("-")[2]
            process.label, process.job = process.label or message["who"], process.job or job
            process.records.append(record)
            if message["watched"]:  # find the rank that blocks the others while the job runs
                noun, members = message["who"].split(" ")[0], tuple(message["members"])
                opened = descriptors.pop() if descriptors else -1  # its file may have been removed
                self._watching().add(job, record, process, noun, members, opened)
        elif observer is not None and "hosts" in message:
            from commplan.sidecar.mail import Address  # noqa: PLC0415

            hosts = {
                tuple(ranks): Address(host, port, key, tuple(addresses))
                for ranks, host, port, key, addresses in message["hosts"]
            }
            observer.add_hosts(record, hosts)
        elif observer is not None:
            observer.remove(record)

    def _watching(self) -> Observer:
        """The observer, which is created on the first call."""
        from commplan.sidecar import mail, observer  # noqa: PLC0415

        if self.observer is None:
            self.observer = observer.Observer(functools.partial(mail.send, self.mail), self.address)
        return self.observer

    def run(self) -> None:
        """Run until the last process has ended."""
        self.accept()
        looked_s = 0.0  # the `time.monotonic` of the last evaluation
        while True:
            if not self.running and not self.news and self.has_ended():
                return
            # Without watched jobs, only messages and ends of processes wake the sidecar.
            is_idle = bool(self.running) and (self.observer is None or not self.observer.jobs)
            events = self.selector.select(_QUIET_S if self.news else None if is_idle else _TICK_S)
            for key, _ in events:
                key.data()
            if self.observer is not None and time.monotonic() >= looked_s + _TICK_S:
                looked_s = time.monotonic()
                self.observer.poll()
            if not events or any(time.monotonic() > process.seconds + _LATEST_S for process in self.news):
                for process in self.news:
                    self.evaluate_end(process)
                self.news.clear()

    def has_ended(self) -> bool:
        """Remove the socket and the port file, unless a process has just connected.

        Returns:
            Whether they are removed. False also if another process keeps the lock.
        """
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
        """Accept the processes of this user that have connected."""
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self.listener.accept()
                if peer(line)[1] != os.getuid():
                    line.close()
                    continue
                process = AttendedProcess(line, self.handle_record)
                self.running.append(process)
                receive = functools.partial(self.receive_from, process)
                self.selector.register(line, selectors.EVENT_READ, receive)

    def receive_from(self, process: AttendedProcess) -> None:
        """Receive messages of a process. From its first message on, wait for its end."""
        is_introduced, is_open = process.descriptor >= 0, process.receive()
        if not is_introduced and process.descriptor >= 0:
            end = functools.partial(self.end, process)
            self.selector.register(process.descriptor, selectors.EVENT_READ, end)
        if not is_open:
            with contextlib.suppress(KeyError, ValueError):  # it has ended at the same time
                self.selector.unregister(process.line)
            if process.descriptor < 0:  # it has not introduced itself
                self.running.remove(process)
                process.close()

    def end(self, process: AttendedProcess) -> None:
        """Note that a process has ended, after its last messages."""
        process.seconds, process.ended = time.monotonic(), status(process.number, process.descriptor)
        process.receive()
        for file in (process.line, process.descriptor):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(file)
        self.running.remove(process)
        self.news.append(process)

    def evaluate_end(self, process: AttendedProcess) -> None:
        """Evaluate the end of a process in `news`.

        Adds the end to its records, unless the process has reported it. If it is the last process of its job
        here, prints how the job ended.
        """
        unreported = self.unreported.setdefault(process.job, [])
        if not process.has_left and (text := described(process.ended)):
            from commplan.recorder.file import append_end  # noqa: PLC0415  it takes long to load

            for path in process.records:
                with contextlib.suppress(OSError, ValueError):
                    append_end(path, text, process.seconds)
            unreported.append(process)
        after = self.news[self.news.index(process) + 1 :]
        if all(other.job != process.job for other in (*self.running, *after)):
            self._report_end(self.unreported.pop(process.job), process)
        if self.observer is not None:
            self.observer.drop(self.running)
        process.close()

    def _report_end(self, unreported: list[AttendedProcess], last: AttendedProcess) -> None:
        """Print why a job without running processes ended, if none of them has reported it.

        Args:
            unreported: The processes of the job that have died without a report.
            last: The last process of the job that ended. Its standard error receives the text, if it is open.
        """
        if not unreported or last.errors < 0:
            return
        from commplan.recorder.last_words import last_words, read_jobs  # noqa: PLC0415

        # The first record of each process belongs to the job's first communicator or mesh.
        records = read_jobs(process.records[0] for process in unreported)
        if text := last_words(records, last.label.split(" ")[0], kills_for_memory() - self.killed):
            last.write_stderr(text)


def main() -> None:
    """Run the sidecar with the sockets in the arguments of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # each process has several descriptors here
    Sidecar(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])).run()


if __name__ == "__main__":
    main()
