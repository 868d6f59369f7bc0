"""The file that a rank records into: a header, names, and a ring of events."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from commplan.diagnostics import fail

MAGIC, VERSION = b"commplan", 1
# Magic, version, process, rank, ranks, time of the start since 1970 and since boot (ns), places in the ring,
# events written, names, whether an operation failed, host, machine, plan.
_HEADER = struct.Struct("<8s 10q 64s 128s 128s")
_NAME, MOST_NAMES, CAPACITY = 128, 512, 8192
EVENT = struct.Struct("<6q")  # nanoseconds since boot, kind, name, operation, runs, nbytes
EVENTS = _HEADER.size + _NAME * MOST_NAMES  # where the ring begins
SIZE = EVENTS + EVENT.size * CAPACITY
HEAD, NAMES, FAILURES = (
    64,
    72,
    80,
)  # where the header has the events written, the names, and whether one failed
BEGIN, END, FAILED, VERDICT = 1, 2, 3, 4
_KEPT_S = 7 * 86400.0


class Event(NamedTuple):
    """seconds: since 1970. kind: BEGIN, END, FAILED, or VERDICT, whose name is what this rank's watchdog said
    of the job. operation: its number on this rank. runs: of what has this name, this one included. nbytes:
    that it moves on this rank."""

    seconds: float
    kind: int
    name: str
    operation: int
    runs: int
    nbytes: int


class Record(NamedTuple):
    """What one rank recorded, events in order. started: seconds since 1970. lost: of the first events, which
    the ring has dropped."""

    path: str
    plan: str
    rank: int
    ranks: int
    host: str
    machine: str
    process: int
    started: float
    failed: bool
    lost: int
    events: tuple[Event, ...]


def folder() -> Path:
    """Where records lie: $COMMPLAN_RECORDS, else memory, else among temporary files."""
    named = os.environ.get("COMMPLAN_RECORDS")
    memory = Path("/dev/shm")
    return Path(named) if named else memory if memory.is_dir() else Path(tempfile.gettempdir())


def prefix() -> str:
    """How the names of this user's records begin."""
    return f"commplan-{os.getuid()}-"


def machine() -> str:
    """What processes share that see each other's numbers: the machine since it booted, their name space."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname()


class Recording:
    """A new file of this process's own, mapped. Raises OSError where it cannot be made."""

    def __init__(self, job: str, plan: str, rank: int, ranks: int) -> None:
        self.path = folder() / f"{prefix()}{job}.{rank}.rec"
        _drop_stale(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(
                descriptor, 0, SIZE
            )  # a full file system says so here, and not by a signal later
            self.memory = mmap.mmap(descriptor, SIZE)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        texts = (socket.gethostname().encode()[:63], machine().encode()[:127], plan.encode()[:127])
        numbers = (VERSION, os.getpid(), rank, ranks, time.time_ns(), time.monotonic_ns(), CAPACITY, 0, 0, 0)
        _HEADER.pack_into(self.memory, 0, MAGIC, *numbers, *texts)

    def remove(self) -> None:
        """At a clean end. What failed is kept."""
        if not _HEADER.unpack_from(self.memory, 0)[10]:
            self.path.unlink(missing_ok=True)


def put_name(memory: mmap.mmap | bytearray, index: int, text: str) -> None:
    """Call name `index` of a record `text`; names that do not fit share the last one."""
    index = min(index, MOST_NAMES - 1)
    name = text.encode()[: _NAME - 1].ljust(_NAME, b"\0")
    memory[_HEADER.size + index * _NAME : _HEADER.size + (index + 1) * _NAME] = name
    struct.pack_into("<q", memory, NAMES, max(index + 1, struct.unpack_from("<q", memory, NAMES)[0]))


def _drop_stale(where: Path) -> None:
    """This user's records of processes that ended long ago."""
    for path in where.glob(f"{prefix()}*.rec"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink()


def read_records(paths: Iterable[str]) -> list[Record]:
    """The records in files, and in folders of them, by rank. Raises CP1114 for a file that is none."""
    files: list[Path] = []
    for place in map(Path, paths):
        files += sorted(place.glob(f"{prefix()}*.rec")) if place.is_dir() else [place]
    return sorted((_read(path) for path in files), key=lambda record: (record.plan, record.rank))


def _read(path: Path) -> Record:
    try:
        data = path.read_bytes()
    except OSError as error:
        return fail("CP1114", f"{path} cannot be read: {error.strerror}", file=str(path))
    if len(data) != SIZE or data[: len(MAGIC)] != MAGIC:
        fail(
            "CP1114",
            f"{path} is no record of a rank",
            "expected a file that a run wrote: *.rec",
            file=str(path),
        )
    _, version, process, rank, ranks, unix_ns, boot_ns, capacity, head, count, failed, *texts = (
        _HEADER.unpack_from(data)
    )
    if version != VERSION or capacity != CAPACITY:
        fail(
            "CP1114", f"{path} is a record of version {version}", f"this is version {VERSION}", file=str(path)
        )
    host, space, plan = (text.split(b"\0")[0].decode(errors="replace") for text in texts)
    names = [_name(data, index) for index in range(min(count, MOST_NAMES))]
    events = [
        _event(data, index % CAPACITY, names, unix_ns - boot_ns)
        for index in range(max(0, head - CAPACITY), head)
    ]
    whole = tuple(sorted(event for event in events if event.kind))
    lost = max(0, head - CAPACITY)
    return Record(
        str(path), plan, rank, ranks, host, space, process, unix_ns / 1e9, bool(failed), lost, whole
    )  # fmt: skip


def _name(data: bytes, index: int) -> str:
    at = _HEADER.size + _NAME * index
    return data[at : at + _NAME].split(b"\0")[0].decode(errors="replace")


def _event(data: bytes, place: int, names: list[str], offset_ns: int) -> Event:
    at = EVENTS + EVENT.size * place
    nanoseconds, kind, name, operation, runs, nbytes = EVENT.unpack_from(data, at)
    return Event((nanoseconds + offset_ns) / 1e9, kind, names[name], operation, runs, nbytes)
