"""Connects a process with the sidecar of its host, and starts the sidecar if there is none.

`attend` introduces the process, a thread answers the sidecar's requests for the Python stack, and `leave`
reports a normal end. `folder`, `locked` and `peer` are also for the sidecar itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from commplan import io
from commplan.ending import at_last
from commplan.sidecar.mail import Address, open_socket, own_addresses

# The name of the socket in `folder()`. The number is the version of the messages. The checksum of the path of
# this package prevents that two installations share a sidecar.
SOCKET = f"sidecar-7-{zlib.crc32(str(Path(__file__).resolve().parent).encode()):08x}"
PORT = f"{SOCKET}.port"  # the name of the file with the port for datagrams and the key
LOCK_S = 5.0  # maximum wait for the lock in seconds; another process keeps it for milliseconds
_POLL_S = 0.005  # seconds between two attempts to take the lock
_ANSWER_S = 3.0  # maximum wait in seconds of a process that aborts for the sidecar's answer
_HOSTS = 20  # maximum number of hosts in a message, which has at most 64 kB
_STACK = 2048  # maximum characters of a stack in a message
_CREDENTIALS = struct.Struct("3i")  # the numbers of process, user and group

_lock = threading.RLock()  # protects the lists below
_lines: list[socket.socket] = []  # the connection to the sidecar, if there is one
_sent: list[bytes] = []  # all messages to the sidecar, for one that replaces it
_ports: list[bytes] = []  # the content of `PORT` of each sidecar that this process has joined
_released = threading.Event()  # set when the sidecar has closed its copy of standard error
_exempt: list[bool] = []  # non-empty in a forked child, which sends no messages


def attend(
    record: Path, label: str, *, watched: bool = False, job: str = "", members: Sequence[int] = ()
) -> Address | None:
    """Introduce this process and a record of it to the sidecar of this host, which is started if necessary.

    The sidecar reports how this process ends, if no other process does. The first call takes some
    milliseconds, further calls add records. COMMPLAN_SIDECAR=0 starts no sidecar; other values name a folder
    of this host for the socket.

    Args:
        record: The file of a `Recording`.
        label: The rank in messages, such as `rank 2` or `process 0`.
        watched: Whether the sidecar finds the rank that blocks others, see `recorder.live.put_limits`.
        job: The name of the job; if empty, that in the name of `record`.
        members: The processes that run the recorded steps together, if whole steps are recorded; else empty.

    Returns:
        The address of the sidecar. None if COMMPLAN_SIDECAR is 0, in a forked child, or, with a
        RuntimeWarning, if no sidecar can run.
    """
    if _exempt or os.environ.get("COMMPLAN_SIDECAR") == "0":
        return None
    content = {"record": str(record), "who": label, "watched": watched, "job": job, "members": [*members]}
    message = json.dumps(content).encode()
    opened: list[int] = []
    try:
        if watched:  # this process may end, and remove the file, before the sidecar opens it
            opened.append(io.open_file(record, os.O_RDWR | os.O_NOFOLLOW))
        with _lock:
            (_send if _sent else _introduce)(message, opened)
        return own_address()
    except (OSError, ValueError) as error:
        warnings.warn(
            f"processes that block others are not reported: no sidecar runs: {error}", RuntimeWarning, 3
        )
        return None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def is_attended() -> bool:
    """Whether this process is connected with a sidecar."""
    return bool(_lines)


def own_address() -> Address:
    """The address of the sidecar of this host.

    Raises:
        OSError: If there is none.
        ValueError: If its file is damaged.
    """
    port, key = io.read(folder() / PORT).decode("ascii").split()
    return Address(socket.gethostname(), int(port), key, own_addresses())


def introduce_hosts(record: Path, rank: int, addresses: Mapping[int, Address | None]) -> None:
    """Send the addresses of the other sidecars of a job to the sidecar of this host.

    Args:
        record: The record of this process.
        rank: The rank of this process.
        addresses: By rank, including `rank`, the result of `attend`. Ranks with None are omitted.
    """
    hosts: dict[Address, list[int]] = {}
    for other, address in addresses.items():
        if address is not None and address != addresses[rank]:
            hosts.setdefault(address, []).append(other)
    rows = [(ranks, *address) for address, ranks in hosts.items()]
    for begin in range(0, len(rows), _HOSTS):
        _send(json.dumps({"record": str(record), "hosts": rows[begin : begin + _HOSTS]}).encode())


def unwatch(record: Path) -> None:
    """Make the sidecar of this host close this record, which it no longer watches."""
    _send(json.dumps({"record": str(record)}).encode())


def _send(message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message to the sidecar, and to a sidecar that replaces it. Has no effect before `_introduce`."""
    if not _sent or _exempt:
        return
    with _lock, contextlib.suppress(OSError):
        _sent.append(message)
        if _lines:
            _ = socket.send_fds(_lines[0], [message], descriptors)


def _introduce(message: bytes, descriptors: Sequence[int]) -> None:
    """Join the sidecar with this first message, and start the thread that answers it. Raises OSError."""
    _sent.append(message)
    try:
        line = _join(descriptors)
    except OSError:
        _sent.clear()
        raise
    at_last(leave)  # a process may be aborted while its exit handlers run
    threading.Thread(target=_attended, args=(line,), name="commplan-sidecar", daemon=True).start()


def _join(descriptors: Sequence[int] = ()) -> socket.socket:
    """Connect to the sidecar and send it all messages, with a pidfd and standard error. Raises OSError."""
    line = _connected(_ports)
    # A sidecar that starts after the death of this process still receives both descriptors.
    descriptor = os.pidfd_open(os.getpid())
    try:
        _ = socket.send_fds(line, _sent[:1], [descriptor, 2, *descriptors])
        for message in _sent[1:]:
            line.send(message)
    except OSError:
        line.close()
        raise
    finally:
        os.close(descriptor)
    _lines.append(line)
    return line


def _attended(line: socket.socket) -> None:
    """Answer the sidecar until it ends. If this process has not left it then, join another one, once.

    Prints a message if the other one ends as well, or cannot be joined.
    """
    _answer(line)
    reason = "it has ended twice"
    try:
        if (other := _rejoin(line)) is None:
            return
        _answer(other)
        with _lock:
            if other not in _lines:
                return
    except OSError as error:
        reason = str(error)
    text = "commplan: the sidecar of this host has ended: processes that block others are not reported"
    print(f"{text}: {reason}", file=sys.stderr, flush=True)


def _rejoin(line: socket.socket) -> socket.socket | None:
    """Join another sidecar in place of that at `line`; None if this process has left it. Raises OSError."""
    with _lock:
        if line not in _lines:
            return None
        _lines.remove(line)
        line.close()
        return _join()


def _answer(line: socket.socket) -> None:
    """Answer the sidecar's requests for the stack of the main thread, until the connection ends."""
    from commplan.recorder.lane import activity  # noqa: PLC0415  the sidecar does not need it
    from commplan.recorder.stacks import own_frames, shown  # noqa: PLC0415

    with contextlib.suppress(OSError):
        while data := line.recv(64):
            if data == b"{}":  # the answer to the message of `leave`
                _released.set()
                continue
            stack = "; ".join(filter(None, (shown(own_frames()), activity())))
            line.send(json.dumps({"stack": stack[:_STACK]}).encode())


def leave(*, aborts: bool = False) -> None:
    """Report that this process ends, and has printed the reason if there is one. Then disconnect.

    Args:
        aborts: Whether the process ends its job as well. If so, wait for up to `_ANSWER_S` until the sidecar,
            which may still be starting, has closed its copy of standard error.
    """
    if _exempt:
        return
    with _lock:
        lines = _lines.copy()
        _lines.clear()
        _sent.clear()
    for line in lines:
        with contextlib.suppress(OSError), line:
            line.send(b'{"aborts": 1}' if aborts else b"{}")
            _ = aborts and _released.wait(_ANSWER_S)
            line.shutdown(socket.SHUT_RDWR)


def _forked() -> None:
    """Disconnect a forked child. The sidecar attends only its parent."""
    _exempt.append(True)  # another thread may have held the lock: it is not used from now on
    while _lines:
        _lines.pop().close()


os.register_at_fork(after_in_child=_forked)


def folder() -> Path:
    """The folder of the sidecar's socket, which only this user may enter.

    $COMMPLAN_SIDECAR, else a folder in `/dev/shm`, else in that of temporary files.
    """
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return Path(os.environ.get("COMMPLAN_SIDECAR") or parent / f"commplan-{os.getuid()}")


@contextlib.contextmanager
def locked() -> Generator[Path]:
    """Prevent other processes of this user from starting or ending a sidecar. Yields `folder()`.

    Raises:
        OSError: If the folder cannot be created or opened, or if other users have access to it.
        TimeoutError: If another process keeps the lock for `LOCK_S`.
    """
    place, deadline_s = folder(), time.monotonic() + LOCK_S
    while (descriptor := _opened(place)) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"another process has had {place} for {LOCK_S:g} s")
        time.sleep(_POLL_S)
    try:
        yield place
    finally:
        os.close(descriptor)


def _opened(place: Path) -> int | None:
    """Create and lock the folder.

    Returns:
        Its descriptor, whose end releases the lock; None if another process has locked the folder or has just
        removed it.

    Raises:
        OSError: As `locked`.
    """
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    try:
        descriptor = io.open_folder(place)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(place.stat(), os.fstat(descriptor)):  # it has not been replaced
                locked_folder, descriptor = descriptor, -1
                return locked_folder
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return None


def _connected(ports: list[bytes]) -> socket.socket:
    """A connection to the sidecar: to a running one, else to a new one, which may still be starting.

    Args:
        ports: The content of `PORT` of each sidecar that has ended. These are not joined again: a process
            that is killed may still listen while it closes its files. Extended by that of the result.

    Raises:
        OSError: If no sidecar can be started or joined, or as `locked`.
    """
    with locked() as place:
        address = str(place / SOCKET)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            port = io.read(place / PORT)
            if port not in ports:
                line.connect(address)
                if peer(line)[1] == os.getuid():
                    ports.append(port)
                    return line
        (place / SOCKET).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(4096)
        mail = open_socket()
        ports.append(f"{mail.getsockname()[1]} {secrets.token_hex(16)}".encode("ascii"))
        io.write(place / PORT, ports[-1])
        line.connect(address)
    with listener, mail:  # other processes may be connected already
        _start(listener.fileno(), mail.fileno())
    return line


def _start(*descriptors: int) -> None:
    """Start the sidecar with these descriptors, in a new session: it outlives the processes of a job."""
    words = [sys.executable, "-P", "-m", "commplan.sidecar", *map(str, descriptors)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    null = subprocess.DEVNULL
    sidecar = subprocess.Popen(
        words, pass_fds=descriptors, stdin=null, stdout=null, stderr=null, start_new_session=True,
        cwd="/", env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    sidecar.returncode = 0  # it outlives this process: prevents a warning of Python


def peer(line: socket.socket) -> tuple[int, int]:
    """The process number and the user number at the other end of a Unix socket."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return process, user
