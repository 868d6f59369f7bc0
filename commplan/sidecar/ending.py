"""Determines how a process ended that is not a child of this one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from pathlib import Path

# PIDFD_GET_INFO of Linux 6.15 and newer: the exit status, after the parent has waited for the process.
_INFO, _EXIT = struct.Struct("<2Q11Ii"), 1 << 3
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_OF_STAT = 51  # field of /proc/PID/stat: the exit status, if the reader may trace the process
_WORDS = {
    signal.SIGKILL: "was killed", signal.SIGABRT: "was aborted", signal.SIGSEGV: "crashed",
    signal.SIGBUS: "crashed", signal.SIGFPE: "crashed", signal.SIGILL: "crashed",
}  # fmt: skip
_TRIES, _PAUSE_S = 20, 0.005


def status(process: int, descriptor: int) -> int | None:
    """The wait status of a process that has just ended, by its number and a pidfd; None if unknown.

    It is in /proc until the parent waits for the process. Newer kernels also report it afterwards.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                return int(fields[_OF_STAT - 2])
        with contextlib.suppress(OSError):
            info = bytearray(_INFO.pack(_EXIT, *(0,) * 13).ljust(64, b"\0"))
            fcntl.ioctl(descriptor, _GET_INFO, info)
            flags, *_, ended = _INFO.unpack_from(info)
            if flags & _EXIT:
                return ended
        time.sleep(_PAUSE_S)
    return None


def described(ended: int | None) -> str:
    """`was killed (SIGKILL)`; empty for an end with status 0."""
    if ended is None:
        return "has died"
    if os.WIFSIGNALED(ended):
        number = os.WTERMSIG(ended)
        try:
            name = signal.Signals(number)
        except ValueError:
            return f"was ended by signal {number}"
        return f"{_WORDS.get(name, 'was ended')} ({name.name})"
    code = os.WEXITSTATUS(ended)
    return f"exited with status {code} in the middle of its program" if code else ""


def kills_for_memory() -> int:
    """The number of processes that the kernel has killed for lack of memory since the machine booted."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text("ascii").splitlines():
            name, number = line.split()
            if name == "oom_kill":
                return int(number)
    return 0
