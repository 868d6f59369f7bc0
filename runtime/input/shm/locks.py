"""Locks on bytes of shared files, which the kernel releases when a process ends; and the folder of such
files."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, process


def default_folder() -> Path:
    """A file system in memory if there is one, otherwise the folder of temporary files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        return memory
    import tempfile  # noqa: PLC0415  takes memory that few processes need

    return Path(tempfile.gettempdir())


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another process holds the lock on `byte`."""
    return _query_lock(descriptor, byte)[0] != fcntl.F_UNLCK


def unlock_byte(descriptor: int, byte: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def lock_holder(descriptor: int, byte: int) -> int:
    """The PID of the other process that holds the lock on `byte`; 0 if it is free."""
    answer = _query_lock(descriptor, byte)
    return max(0, answer[4]) if answer[0] != fcntl.F_UNLCK else 0


def _query_lock(descriptor: int, byte: int) -> tuple[int, ...]:
    """The kernel's description of the lock on `byte` (see `_FLOCK`)."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    return struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))


def lock_byte(descriptor: int, byte: int) -> bool:
    """Lock `byte` until this process ends or closes the file. Returns False if another process holds it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True
