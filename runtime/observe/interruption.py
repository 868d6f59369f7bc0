"""Handle Ctrl-C while the main thread executes C code.

Python handles a signal only when the main thread returns to the interpreter. JAX's waits for devices do not
return before the step ends, and other processes may delay that forever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import NamedTuple, NoReturn

from commplan.sidecar import leave

STATUS = 130  # The exit status after Ctrl-C, by the convention of shells.
_MOST_SIGNALS = 4096  # The most signal numbers, of one byte each, that are read at once.


class Place(NamedTuple):
    """The position of the main thread.

    Attributes:
        frame: The id of its innermost Python frame.
        instruction: The index of the last instruction in the frame's bytecode.
    """

    frame: int
    instruction: int


def main_place() -> Place:
    """The present position of the main thread. It does not change while the thread executes C code."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(threading.main_thread().ident or 0)
    return Place(id(frame), frame.f_lasti if frame is not None else 0)


def is_interruptible() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt in the main thread: the program has not installed a handler."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


_installed: list[Interruption] = []  # At most one.


def install() -> None:
    """Start to detect Ctrl-C while the main thread is in C."""
    if not _installed:
        _installed.append(Interruption())


def lasts() -> float:
    """See `Interruption.lasts`; 0 before `install`."""
    return _installed[0].lasts() if _installed else 0.0


class Interruption:
    """Detects signals through the wake-up descriptor, to which Python's C handler writes their numbers.

    Detects nothing if the program uses the wake-up descriptor, or if created outside of the main thread.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        # The time of the last Ctrl-C on `time.monotonic`, or 0, and the main thread's position then.
        self._since, self._place = 0.0, main_place()
        with contextlib.suppress(ValueError):  # Only the main thread may set the descriptor.
            other = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            if other >= 0:
                signal.set_wakeup_fd(other)  # The program's own.
            else:
                os.register_at_fork(after_in_child=_reset_wakeup_fd)

    def lasts(self) -> float:
        """Seconds since Ctrl-C, if the main thread has not moved since; else 0.

        A thread calls this regularly: Ctrl-C counts from the first call after it.
        """
        place = main_place()
        with contextlib.suppress(BlockingIOError):
            numbers = self._reader.recv(_MOST_SIGNALS)
            if signal.SIGINT in numbers and not self._since:
                self._since, self._place = time.monotonic(), place
        if place != self._place:
            self._since = 0.0
        return time.monotonic() - self._since if self._since else 0.0


def _reset_wakeup_fd() -> None:
    """Do not report signals of a forked child through the descriptor, which it shares with its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


def print_stderr(text: object) -> None:
    """Print to standard error, if it can be written: the reader of a pipe may have ended."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def end_process(status: int) -> NoReturn:
    """Flush the output, and end this process at once with `status`, without exit handlers."""
    leave()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
