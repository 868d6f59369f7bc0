"""Locks on bytes of shared files, which the kernel releases when a process ends; and a folder for such files.

These are the record locks of fcntl(2). They belong to the process: a process never sees its own locks, and
closing any of its descriptors of a file releases all of its locks on the file.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, PID


def default_folder() -> Path:
    """`/dev/shm`, a file system in memory, if it is writable; otherwise the folder of temporary files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        return memory
    import tempfile  # noqa: PLC0415  takes memory that few processes need

    return Path(tempfile.gettempdir())


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another process holds the lock on `byte`."""
    return _query_lock(descriptor, byte)[0] != fcntl.F_UNLCK


def unlock_byte(descriptor: int, byte: int) -> None:
    """Release this process's lock on `byte`. Raises OSError if the descriptor is closed."""
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def lock_holder(descriptor: int, byte: int) -> int:
    """The PID of the other process that holds the lock on `byte`; 0 if there is none, or unknown."""
    kind, _, _, _, pid = _query_lock(descriptor, byte)
    return max(0, pid) if kind != fcntl.F_UNLCK else 0  # the PID is 0 in another namespace, or -1


def _query_lock(descriptor: int, byte: int) -> tuple[int, ...]:
    """The kernel's description of a lock of another process on `byte`: the fields of `_FLOCK`."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    return struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))


def lock_byte(descriptor: int, byte: int) -> bool:
    """Lock `byte` until this process unlocks it, closes the file or ends.

    Returns:
        False if another process holds the lock, or the file cannot be locked.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True
