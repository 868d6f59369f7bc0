"""Rings of this process in tests, and a process that is stopped while it holds the lock of one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Generator

from support import interpreter

from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.ring import Ring

UNITS = 60


def joined(memory: SharedMemory) -> Ring:
    """The ring of this process, which has one cursor."""
    ring = Ring(memory)
    with memory.locked():
        ring.join()
        memory.cursors[0].set(process=ring.place + 1, position=0, state=1)
        memory.header.set(cursor_places=1)
    return ring


def path_of(memory: SharedMemory) -> str:
    return f"/proc/{os.getpid()}/fd/{memory.descriptor}"


@contextlib.contextmanager
def stopped_in_lock(memory: SharedMemory) -> Generator[int]:
    """The PID of a process that is stopped while it holds the lock."""
    hold = "import fcntl, os, signal, sys\nfile = os.open(sys.argv[1], os.O_RDWR)\n"
    hold += "fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)\nos.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([*interpreter.words(jax=False)[:1], "-c", hold, path_of(memory)])
    try:
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
    finally:
        process.kill()
        process.wait()
