"""Introduces a process to the sidecar of its host, and starts one where there is none."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from commplan import io
from commplan.ending import at_last

SOCKET = "sidecar-2"  # the number is that of what is said over it
LOCK_S = 5.0  # seconds to start or end a sidecar in, which takes milliseconds
_POLL_S = 0.005
_ANSWER_S = 3.0  # for the sidecar to answer one that aborts
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_lines: list[socket.socket] = []  # to the sidecar, while there is one
_exempt: list[bool] = []  # this process says nothing more of itself


def attend(record: Path, who: str) -> None:
    """From now on the sidecar of this host says how this process ends, if nobody else does.

    record: the file of a `Recording`. who: `rank 2`, `process 0`. What keeps a sidecar from running keeps a
    program from nothing. COMMPLAN_SIDECAR=0 starts none; else it may name a folder of this host for the
    socket. It takes some milliseconds, once.
    """
    if _exempt or os.environ.get("COMMPLAN_SIDECAR") == "0" or not hasattr(os, "pidfd_open"):
        return
    message = json.dumps({"record": str(record), "who": who}).encode()
    with contextlib.suppress(OSError):
        if _lines:
            _lines[0].send(message)
            return
        _lines.append(_connected())
        at_last(leave)  # a process may be aborted while its exit handlers run
        # A sidecar that comes up when this process has died already knows of both what they were.
        own = os.pidfd_open(os.getpid())
        try:
            _ = socket.send_fds(_lines[0], [message], [own, 2])
        finally:
            os.close(own)


def leave(*, aborts: bool = False) -> None:
    """This process ends, and has said why where that is to be said. aborts: it ends its job as well, once the
    sidecar, which may still be starting, has let go of what it holds of this process."""
    while _lines:
        with contextlib.suppress(OSError), _lines.pop() as line:
            line.send(b'{"aborts": 1}' if aborts else b"{}")
            line.settimeout(_ANSWER_S)
            _ = aborts and line.recv(1)


def _forked() -> None:
    _exempt.append(True)
    while _lines:
        _lines.pop().close()


os.register_at_fork(after_in_child=_forked)


def folder() -> Path:
    """Where the sidecar's socket lies, which only this user may enter."""
    memory = Path("/dev/shm")
    usual = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return Path(os.environ.get("COMMPLAN_SIDECAR") or usual / f"commplan-{os.getuid()}")


@contextlib.contextmanager
def locked() -> Generator[Path]:
    """While this runs no other process of this user starts or ends a sidecar. Raises OSError for a folder
    that others could have made, and TimeoutError where another process keeps it."""
    place, end = folder(), time.monotonic() + LOCK_S
    while (descriptor := _opened(place)) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"another process has had {place} for {LOCK_S:g} s")
        time.sleep(_POLL_S)
    try:
        yield place
    finally:
        os.close(descriptor)


def _opened(place: Path) -> int | None:
    """The folder, made, locked and still there; None where another process has it or has just removed it."""
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    try:
        descriptor = io.open_folder(place)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(place.stat(), os.fstat(descriptor)):
                kept, descriptor = descriptor, -1
                return kept
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return None


def _connected() -> socket.socket:
    """A line to the sidecar: to one that runs, else to a new one, which need not have come up yet."""
    with locked() as place:
        address = str(place / SOCKET)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            line.connect(address)
            if peer(line)[1] == os.getuid():
                return line
        (place / SOCKET).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(4096)
        line.connect(address)
    with listener:  # others have lines to it already
        _start(listener)
    return line


def _start(listener: socket.socket) -> None:
    """In a session of its own, so that what ends the processes of a job leaves it."""
    words = [sys.executable, "-P", "-m", "commplan.sidecar", str(listener.fileno())]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    null = subprocess.DEVNULL
    sidecar = subprocess.Popen(
        words, pass_fds=[listener.fileno()], stdin=null, stdout=null, stderr=null, start_new_session=True,
        cwd="/", env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    sidecar.returncode = 0  # it outlives this process, of which Python would warn


def peer(line: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    given = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(given)
    return process, user
