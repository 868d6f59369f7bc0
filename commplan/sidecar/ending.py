"""Finds out how a process ended that is not a child of this one, and describes it for messages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from pathlib import Path

# PIDFD_GET_INFO returns the exit status on Linux 6.15 and newer, after the parent has waited for the process.
_INFO = struct.Struct("<2Q11Ii")  # struct pidfd_info: the mask, 12 numbers, the exit status
_INFO_SIZE = 64  # bytes of struct pidfd_info
_EXIT = 1 << 3  # PIDFD_INFO_EXIT, a bit of the mask: the exit status is requested, or was returned
_GET_INFO = 3 << 30 | _INFO_SIZE << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)

# The index, from the state on, of the exit status in /proc/PID/stat, if the reader may trace the process. In
# proc(5), the state is field 3 and the exit status is field 52.
_EXIT_CODE = 49
_WORDS = {
    signal.SIGKILL: "was killed", signal.SIGABRT: "was aborted", signal.SIGSEGV: "crashed",
    signal.SIGBUS: "crashed", signal.SIGFPE: "crashed", signal.SIGILL: "crashed",
}  # fmt: skip
_TRIES = 20  # maximum number of attempts to read the status, which may be there only after a moment
_PAUSE_S = 0.005  # seconds between two attempts


def status(process: int, descriptor: int) -> int | None:
    """The wait status of a process that has just ended, as `os.waitpid` returns it.

    It is in /proc until the parent waits for the process. Newer kernels also report it afterwards.

    Args:
        process: The process number.
        descriptor: A pidfd of the process.

    Returns:
        The status; None if it is not available after a tenth of a second.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                return int(fields[_EXIT_CODE])
        with contextlib.suppress(OSError):
            info = bytearray(_INFO.pack(_EXIT, *(0,) * 13).ljust(_INFO_SIZE, b"\0"))
            fcntl.ioctl(descriptor, _GET_INFO, info)
            flags, *_, ended = _INFO.unpack_from(info)
            if flags & _EXIT:
                return ended
        time.sleep(_PAUSE_S)
    return None


def described(ended: int | None) -> str:
    """The predicate of a message, such as `was killed (SIGKILL)`; empty for an exit with status 0.

    Args:
        ended: A result of `status`.
    """
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
    """The number of processes that the kernel has killed for lack of memory since the boot; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text("ascii").splitlines():
            name, number = line.split()
            if name == "oom_kill":
                return int(number)
    return 0
