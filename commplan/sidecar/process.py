"""A process that the sidecar attends: its connection, its descriptors and its records.

The sidecar receives its messages, requests its Python stack, and prints to its standard error.
"""

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
_READ_MS = 1000  # maximum milliseconds until a pipe at standard error is read
RecordHandler = Callable[["AttendedProcess", dict[str, Any], list[int]], None]  # see `AttendedProcess`


class AttendedProcess:
    """A process that has connected to the sidecar.

    Attributes:
        line: The connection to it.
        number: Its process number according to the kernel.
        label: The rank in messages, such as `rank 2`; empty before its first message.
        job: The name of its first job; empty before its first message.
        records: The files of its records.
        descriptor: A pidfd of it, which it sends with its first message; -1 before, and after `close`.
        errors: Its standard error, which it sends with its first message; -1 before, and after it is closed.
        has_left: Whether it has reported its end.
        ended: Its wait status after its end; None before, or if unknown.
        seconds: When it ended, on `time.monotonic`; 0 before.
        stack: The Python stack of its main thread, in one line, when it last answered; empty if it has not
            answered the last request.
        queried_at: When its stack was requested, on `time.monotonic`; 0 if no request is unanswered.

    Args:
        line: The connection to the process.
        handle_record: Receives this object, a message about a record of the process, and open files, of
            which it removes those that it keeps.
    """

    def __init__(self, line: socket.socket, handle_record: RecordHandler) -> None:
        self.line = line
        self.number, _ = peer(line)
        line.setblocking(False)
        self._handle_record = handle_record
        self.label, self.job, self.stack = "", "", ""
        self.descriptor = self.errors = -1
        self.records: list[Path] = []
        self.has_left = False
        self.ended: int | None = None
        self.seconds = self.queried_at = 0.0

    def receive(self) -> bool:
        """Receive the messages that have arrived. Returns whether the connection is still open."""
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
            with contextlib.suppress(ValueError):  # a message that was truncated, because it is too long
                self._handle(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Handle a stack, a message about a record, or the report of the end, see `attend.leave`."""
        if "stack" in message:
            self.stack, self.queried_at = message["stack"], 0.0
        elif "record" in message:
            self._handle_record(self, message, descriptors)
        else:
            self.has_left = True
            if message and self.errors >= 0:  # some launchers end a job only once no process holds it
                os.close(self.errors)
                self.errors = -1
            with contextlib.suppress(OSError):
                self.line.send(b"{}")

    def request_stack(self) -> None:
        """Request the stack of its main thread, unless a request is unanswered.

        The process does not answer while a thread keeps the interpreter's lock.
        """
        if not self.queried_at:
            self.queried_at, self.stack = time.monotonic(), ""
            with contextlib.suppress(OSError):
                self.line.send(b"stack")

    def write_stderr(self, text: str) -> None:
        """Print `text` to its standard error, if that is open. If a pipe is not read, the rest is dropped."""
        if self.errors < 0:
            return
        data, poll = memoryview(text.encode()), select.poll()
        poll.register(self.errors, select.POLLOUT)
        with contextlib.suppress(OSError):
            while data and poll.poll(_READ_MS):
                data = data[os.write(self.errors, data[: select.PIPE_BUF]) :]  # does not block

    def close(self) -> None:
        """Close the connection and the descriptors."""
        self.line.close()
        for descriptor in (self.descriptor, self.errors):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self.errors = -1  # the job may continue, and the descriptors may be reused
