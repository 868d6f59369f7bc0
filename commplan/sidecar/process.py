"""A process that the sidecar attends: its connection, its descriptors and its records."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commplan.sidecar.attend import peer

_LONGEST = 65536  # maximum bytes of a message
_READ_MS = 1000  # milliseconds until standard error can be written
Take = Callable[["AttendedProcess", dict[str, Any], list[int]], None]


class AttendedProcess:
    """A process that introduces itself.

    Attributes:
        number: Its process number according to the kernel.
        who: Such as `rank 2`.
        job: The name of its first job.
        descriptor, errors: A pidfd of it and its standard error, which it sends; -1 before.
        ended: Its wait status once it has ended; `seconds`: when, on `time.monotonic`; 0 before.
        stack: The Python of its main thread when it last answered.
        queried_at: When it was first queried without an answer, on `time.monotonic`; 0 if there is none.

    Args:
        line: The connection to the process.
        take: Receives a message about a job of the process, and open files, of which it removes those that
            it keeps.
    """

    def __init__(self, line: socket.socket, take: Take) -> None:
        self.line, (self.number, _) = line, peer(line)
        line.setblocking(False)
        self._take_of_job = take
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
        if "stack" in message:
            self.stack, self.queried_at = message["stack"], 0.0
        elif "record" in message:
            self._take_of_job(self, message, descriptors)
        else:
            self.has_left = True
            if message and self.errors >= 0:  # some launchers end a job only once no process holds it
                os.close(self.errors)
                self.errors = -1
            with contextlib.suppress(OSError):
                self.line.send(b"{}")

    def ask_stack(self) -> None:
        """Ask for the Python of its main thread. It does not answer while a thread keeps the lock."""
        if not self.queried_at:
            self.queried_at, self.stack = time.monotonic(), ""
            with contextlib.suppress(OSError):
                self.line.send(b"stack")

    def say(self, text: str) -> None:
        """Print `text` to its standard error, if its pipe is read."""
        if self.errors < 0:
            return
        data, poll = memoryview(text.encode()), select.poll()
        poll.register(self.errors, select.POLLOUT)
        with contextlib.suppress(OSError):
            while data and poll.poll(_READ_MS):
                data = data[os.write(self.errors, data[: select.PIPE_BUF]) :]  # does not block

    def close(self) -> None:
        self.line.close()
        for descriptor in (self.descriptor, self.errors):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self.errors = -1  # the job may continue, and the descriptors may be reused
