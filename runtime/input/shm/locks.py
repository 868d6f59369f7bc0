"""Locks on bytes of shared files, of which the kernel lets go with a process; and where such files lie."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

# struct flock of fcntl(2): type, whence, start, length, process
_LINUX = sys.platform.startswith("linux")
_FLOCK = "hhqqi" if _LINUX else "qqihh"


def default_folder() -> Path:
    """Memory where there is a file system of it."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        return memory
    import tempfile  # noqa: PLC0415  takes memory that few processes need

    return Path(tempfile.gettempdir())


def _flock(kind: int, byte: int) -> bytes:
    if _LINUX:
        return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
    return struct.pack(_FLOCK, byte, 1, 0, kind, os.SEEK_SET)


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another process holds the lock on `byte`."""
    return _asked(descriptor, byte)[0 if _LINUX else 3] != fcntl.F_UNLCK


def unlock_byte(descriptor: int, byte: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def lock_holder(descriptor: int, byte: int) -> int:
    """The number of the other process that holds the lock on `byte`; 0 where none does."""
    answer = _asked(descriptor, byte)
    return max(0, answer[4 if _LINUX else 2]) if answer[0 if _LINUX else 3] != fcntl.F_UNLCK else 0


def _asked(descriptor: int, byte: int) -> tuple[int, ...]:
    """What the kernel says of the lock on `byte` (see `_FLOCK`)."""
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _flock(fcntl.F_WRLCK, byte))
    return struct.unpack(_FLOCK, answer)


def lock_byte(descriptor: int, byte: int) -> bool:
    """Lock `byte` until this process ends or closes the file; False where another process has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True
