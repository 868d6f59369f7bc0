"""Ctrl-C while the main thread is in C: Python handles a signal only once that thread is back, and JAX's
waits for devices do not come back before the step ends, which others may hold for ever."""

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

STATUS = 130  # of a process that Ctrl-C ended, as shells have it


class Place(NamedTuple):
    """Where the main thread is: its innermost frame of Python, and the instruction there."""

    frame: int
    instruction: int


def main_place() -> Place:
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(threading.main_thread().ident or 0)
    return Place(id(frame), frame.f_lasti if frame is not None else 0)


def is_interruptible() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt in the main thread: the program has no handler of its own."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


_installed: list[Interruption] = []


def install() -> None:
    """From now on Ctrl-C is noticed while the main thread is in C."""
    if not _installed:
        _installed.append(Interruption())


def lasts() -> float:
    """Seconds since Ctrl-C, while the main thread has not moved; 0 without one, and if not installed. Called
    again and again."""
    return _installed[0].lasts() if _installed else 0.0


class Interruption:
    """Notices signals as they come, through the descriptor to which Python's own handler writes their numbers
    from any thread, unless the program uses that itself or this is made outside of the main thread."""

    def __init__(self) -> None:
        self._line, self._writer = socket.socketpair()
        for line in (self._line, self._writer):
            line.setblocking(False)
        self._since, self._place = 0.0, main_place()
        with contextlib.suppress(ValueError):  # another thread than the main one may not
            other = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            if other >= 0:
                signal.set_wakeup_fd(other)
            else:  # the signals of a child are its own
                os.register_at_fork(after_in_child=_let_go)

    def lasts(self) -> float:
        """Seconds since Ctrl-C, while the main thread has not moved; 0 without one. Asked again and again."""
        place = main_place()
        with contextlib.suppress(BlockingIOError):
            numbers = self._line.recv(4096)
            if signal.SIGINT in numbers and not self._since:
                self._since, self._place = time.monotonic(), place
        if place != self._place:
            self._since = 0.0
        return time.monotonic() - self._since if self._since else 0.0


def _let_go() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


def end_process(status: int) -> NoReturn:
    """End this process at once with `status`, without exit handlers; its output is written before."""
    leave()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
