"""The file that a rank records into: a header, names, and a ring of events."""

from __future__ import annotations

import atexit
import contextlib
import math
import mmap
import os
import socket
import struct
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from commplan.diagnostics import fail

MAGIC, VERSION = b"commplan", 1
# Magic, version, process, rank, ranks, time of the start since 1970 and since boot (ns), places in the ring,
# events written, names, whether an operation failed, host, machine, plan. Behind the zero byte that ends a
# text comes what belongs to it: to the plan its axes (`data=4,node=2`), to a name its `Details`.
_HEADER = struct.Struct("<8s 10q 64s 128s 128s")
_NAME, MOST_NAMES, CAPACITY = 128, 512, 8192
EVENT = struct.Struct("<6q")  # nanoseconds since boot, kind, name, operation, runs, nbytes
EVENTS = _HEADER.size + _NAME * MOST_NAMES  # where the ring begins
SIZE = EVENTS + EVENT.size * CAPACITY
HEAD, NAMES, FAILURES = 64, 72, 80  # in the header: the events written, the names, whether one failed
BEGIN, END, FAILED, VERDICT, WAITED, GONE, ROUND = 1, 2, 3, 4, 5, 6, 7
_RANKS = 2**24  # no job has more
_KEPT_S = 7 * 86400.0


class Details(NamedTuple):
    """What a collective is. nbytes: of the whole buffer. root: counted along `axes`. opens: the phase whose
    first collective it is, or nothing: its runs count the runs of the phase."""

    kind: str
    algorithm: str
    nbytes: int
    dtype: str
    root: int
    opens: str
    axes: tuple[str, ...]

    def text(self) -> str:
        """As it is recorded: at most 100 bytes."""
        start = f"{self.kind} {self.algorithm} {self.nbytes} {self.dtype} {self.root}"
        return f"{start} {self.opens or '-'} {','.join(self.axes)}".encode()[:100].decode(errors="ignore")


class Event(NamedTuple):
    """seconds: since 1970. kind: BEGIN, END, FAILED; VERDICT, whose name is what this rank's watchdog said of
    the job; WAITED: the program has waited `nbytes` nanoseconds for what it had begun before; GONE: the
    process has died, and the name says how, which the sidecar of its host has written; or ROUND, see
    `blame.Progress`. operation: its number on this rank. runs: of what has this name, this one included.
    nbytes: that it moves here."""

    seconds: float
    kind: int
    name: str
    operation: int
    runs: int
    nbytes: int
    details: Details | None = None


class Record(NamedTuple):
    """What one rank recorded, events in order. started: seconds since 1970. lost: of the first events, which
    the ring has dropped. clock: seconds since 1970 at which its machine's clock was 0, as this process saw
    it. axes: their sizes, on whose grid the ranks lie row-major."""

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
    clock: float = 0.0
    axes: Mapping[str, int] = {}


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

    def __init__(
        self, job: str, plan: str, rank: int, ranks: int, axes: Mapping[str, int] | None = None
    ) -> None:
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
        name, sizes = plan.encode()[:127], ",".join(f"{axis}={size}" for axis, size in (axes or {}).items())
        if len(name) + len(sizes) < 127:
            name += b"\0" + sizes.encode()
        texts = (socket.gethostname().encode()[:63], machine().encode()[:127], name)
        numbers = (VERSION, os.getpid(), rank, ranks, time.time_ns(), time.monotonic_ns(), CAPACITY, 0, 0, 0)
        _HEADER.pack_into(self.memory, 0, MAGIC, *numbers, *texts)

    def remove(self) -> None:
        """At a clean end. What failed is kept, and all where $COMMPLAN_KEEP_RECORDS says so."""
        failed = _HEADER.unpack_from(self.memory, 0)[10]
        if not failed and not is_kept():
            self.path.unlink(missing_ok=True)


def is_kept() -> bool:
    """Whether records stay after a clean end."""
    return os.environ.get("COMMPLAN_KEEP_RECORDS", "0") not in ("", "0")


def start_recording(
    job: str, plan: str, rank: int, ranks: int, axes: Mapping[str, int] | None = None
) -> Recording | None:
    """A new record, which is removed where this process ends well; None, with a warning, where none can be
    made."""
    try:
        recording = Recording(job, plan, rank, ranks, axes)
    except OSError as error:
        warnings.warn(f"this run is not recorded: {error}", RuntimeWarning, 3)
        return None
    atexit.register(recording.remove)
    return recording


def put_name(memory: mmap.mmap | bytearray, index: int, text: str) -> None:
    """Call name `index` of a record `text`; names that do not fit share the last one."""
    index = min(index, MOST_NAMES - 1)
    name = text.encode()[: _NAME - 1].ljust(_NAME, b"\0")
    memory[_HEADER.size + index * _NAME : _HEADER.size + (index + 1) * _NAME] = name
    struct.pack_into("<q", memory, NAMES, max(index + 1, struct.unpack_from("<q", memory, NAMES)[0]))


def append_end(memory: mmap.mmap, text: str) -> None:
    """Put into the record of a process that has died how it did; the record is kept."""
    _, *_, capacity, head, names, _, _, _, _ = _HEADER.unpack_from(memory)
    index = min(names, MOST_NAMES - 1)
    put_name(memory, index, text)
    EVENT.pack_into(
        memory, EVENTS + EVENT.size * (head % capacity), time.monotonic_ns(), GONE, index, 0, 0, 0
    )
    struct.pack_into("<q", memory, HEAD, head + 1)
    struct.pack_into("<q", memory, FAILURES, 1)


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
    """The record in a file that may still be written."""
    try:
        data = path.read_bytes()
        with path.open("rb") as file:
            after = file.read(_HEADER.size)
    except OSError as error:
        return fail("CP1114", f"{path} cannot be read: {error.strerror}", file=str(path))
    if len(data) != SIZE or len(after) != _HEADER.size or data[: len(MAGIC)] != MAGIC:
        note = "expected a file that a run wrote, whole: *.rec"
        fail("CP1114", f"{path} is no record of a rank", note, file=str(path))
    _, version, process, rank, ranks, unix_ns, boot_ns, capacity, head, count, failed, *texts = (
        _HEADER.unpack_from(data)
    )
    if version != VERSION or capacity != CAPACITY:
        fail(
            "CP1114", f"{path} is a record of version {version}", f"this is version {VERSION}", file=str(path)
        )
    if not 0 <= rank < ranks <= _RANKS:
        fail("CP1114", f"{path} is a damaged record: it is of rank {rank} of {ranks}", file=str(path))
    (host, _), (space, _), (plan, sizes) = map(_texts, texts)
    # What was overwritten while this was read has been lost; so has the place that is written next.
    written = _HEADER.unpack_from(after)[8]
    lost = max(0, head - CAPACITY, written - CAPACITY + (written > head))
    events = sorted(_events(data, lost, head, count, unix_ns - boot_ns), key=lambda event: event.seconds)
    return Record(
        str(path), plan, rank, ranks, host, space, process, unix_ns / 1e9, bool(failed), lost, tuple(events),
        (unix_ns - boot_ns) / 1e9, _sizes(sizes, ranks),
    )  # fmt: skip


def _events(data: bytes, first: int, head: int, count: int, offset_ns: int) -> Iterator[Event]:
    """Events `first` to before `head`; what is damaged is passed over."""
    places = (_HEADER.size + _NAME * index for index in range(min(count, MOST_NAMES)))
    names = [_texts(data[at : at + _NAME]) for at in places]
    details = [_details(text) for _, text in names]
    for index in range(first, head):
        event = EVENT.unpack_from(data, EVENTS + EVENT.size * (index % CAPACITY))
        nanoseconds, kind, name, operation, runs, nbytes = event
        if BEGIN <= kind <= ROUND and 0 <= name < len(names):
            when = (nanoseconds + offset_ns) / 1e9
            yield Event(when, kind, names[name][0], operation, runs, nbytes, details[name])


def _texts(field: bytes) -> tuple[str, str]:
    """A text that ends with a zero byte, and the one behind it."""
    text, _, behind = field.partition(b"\0")
    return text.decode(errors="replace"), behind.split(b"\0")[0].decode(errors="replace")


def _details(text: str) -> Details | None:
    try:
        kind, algorithm, nbytes, dtype, root, opens, axes = text.split(" ")
        return Details(
            kind, algorithm, int(nbytes), dtype, int(root), "" if opens == "-" else opens,
            tuple(filter(None, axes.split(","))),
        )  # fmt: skip
    except ValueError:
        return None


def _sizes(text: str, ranks: int) -> Mapping[str, int]:
    """`data=4,node=2`; nothing where that does not make up the ranks."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    sizes = {axis: int(size) for axis, _, size in pairs if size.isdecimal()}
    return sizes if math.prod(sizes.values()) == ranks else {}
