"""The file that a rank records into: a header, names, and a ring of events."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from commplan import io
from commplan.diagnostics import fail

MAGIC, VERSION = b"commplan", 3
# Magic, version, process, rank, ranks, time of the start since 1970 and since boot (ns), slots of the ring,
# events written, names, whether an operation failed, host, machine, plan. A second text follows the zero byte
# that ends a text: the lane after the host, the axes after the plan (`data=4,node=2`), the `Details` after a
# name. The ring is followed by the end of the process, the signal that requests its Python stacks, which it
# appends to the file (0: none), and the current call of the user's code, with its begin (ns since boot).
_HEADER = struct.Struct("<8s 10q 64s 128s 128s")
_NAME, MOST_NAMES, CAPACITY = 128, 512, 8192
EVENT = struct.Struct("<6q")  # nanoseconds since boot, kind, name, operation, runs, nbytes
EVENTS = _HEADER.size + _NAME * MOST_NAMES  # the offset of the ring
_ENDING = EVENTS + EVENT.size * CAPACITY
STACK_SIGNAL = _ENDING + 504
_CALL = STACK_SIGNAL + 8
LIVE = _CALL + 3584  # the block of `recorder.live`
SIZE = LIVE + 4096
_WHOLE = (0, SIZE), (0, _HEADER.size)
HEAD, NAMES, FAILURES = 64, 72, 80  # in the header: the events written, the names, whether one failed
BEGIN, END, FAILED, VERDICT, WAITED, GONE, ROUND = 1, 2, 3, 4, 5, 6, 7
_RANKS, _EVENTS = 2**24, 2**62  # no job has more
SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else 0  # requests stacks of a process
_KEPT_S = 7 * 86400.0
_SINCE = struct.Struct("<q")


class Details(NamedTuple):
    """A collective, or an operation of a lane (`lane.Kind`), whose `algorithm` names the ranks that share it.

    nbytes: of the whole buffer. root: counted along `axes`. opens: the phase whose first collective it is,
    or empty; its runs are the runs of the phase."""

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
    """seconds: since 1970. kind: BEGIN, END, FAILED; VERDICT: the name is the watchdog's verdict; WAITED: the
    program has waited `nbytes` nanoseconds for an operation that began earlier; GONE: the process has
    died, and the name, from the sidecar of its host, describes how; or ROUND, see `blame.Progress`.
    operation: its number on this rank. runs: of operations with this name, this one included. nbytes: that it
    moves on this rank; in a lane, see `lane.Lane.begin`."""

    seconds: float
    kind: int
    name: str
    operation: int
    runs: int
    nbytes: int
    details: Details | None = None


class Call(NamedTuple):
    """A call of the user's code that has not returned. text: its description. seconds: when it was first
    observed, since 1970. stack: its Python stack, innermost frame first; empty if unknown."""

    text: str
    seconds: float
    stack: str = ""

    def sentence(self, now: float) -> str:
        """The call, as the end of a sentence about its process."""
        python = f"; its Python: {self.stack}" if self.stack else ""
        return f"in {self.text}, for {now - self.seconds:.1f} s{python}"


class Record(NamedTuple):
    """The record of one rank, with its events in order. started: seconds since 1970. lost: the number of
    events that the ring has dropped. clock: the time since 1970 when its machine's clock was 0, measured by
    this process. axes: their sizes; ranks are in row-major order on this grid. lane: `input`, `feed`,
    `requests` or `server`; empty for collectives. ended: how the process exited, for a message; empty if it
    died or runs. call: a call that takes long, if any."""

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
    lane: str = ""
    ended: str = ""
    call: Call | None = None


def folder() -> Path:
    """The folder of records: $COMMPLAN_RECORDS, else `/dev/shm`, else that of temporary files."""
    named = os.environ.get("COMMPLAN_RECORDS")
    memory = Path("/dev/shm")
    return Path(named) if named else memory if memory.is_dir() else Path(tempfile.gettempdir())


def prefix() -> str:
    """The prefix of the names of this user's records."""
    return f"commplan-{os.getuid()}-"


def machine() -> str:
    """The boot id of this machine and the PID name space: equal for processes that share process numbers."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname()


class Recording:
    """A new, mapped file of this process. lane: see `Record`.

    Raises OSError if it cannot be created.
    """

    def __init__(
        self,
        job: str,
        plan: str,
        rank: int,
        ranks: int,
        axes: Mapping[str, int] | None = None,
        lane: str = "",
    ) -> None:
        self.job, self.plan, self.rank, self.ranks = job, plan, rank, ranks
        self.process, self._end = os.getpid(), ""
        self.path = path_of(job, rank, lane)
        self._lanes: dict[str, Recording] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_stale(self.path.parent)
        descriptor = io.open_file(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # a full file system raises here, and not a signal later
            self.memory = mmap.mmap(descriptor, SIZE)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        name, sizes = plan.encode()[:127], ",".join(f"{axis}={size}" for axis, size in (axes or {}).items())
        if len(name) + len(sizes) < 127:
            name += b"\0" + sizes.encode()
        host = socket.gethostname().encode()[: 62 - len(lane)] + b"\0" + lane.encode()
        numbers = (VERSION, os.getpid(), rank, ranks, time.time_ns(), time.monotonic_ns(), CAPACITY, 0, 0, 0)
        _HEADER.pack_into(self.memory, 0, MAGIC, *numbers, host, machine().encode()[:127], name)

    def lane(self, name: str) -> Recording:
        """The file of this lane, which is kept or removed with this one. Raises OSError."""
        if name not in self._lanes:
            self._lanes[name] = Recording(self.job, self.plan, self.rank, self.ranks, lane=name)
        return self._lanes[name]

    def put_call(self, call: Call | None) -> None:
        """Record a call of the user's code that takes long, its seconds on `time.monotonic`; None: there is
        none."""
        _SINCE.pack_into(self.memory, _CALL, int(call.seconds * 1e9) if call else 0)
        text = f"{call.text}\0{call.stack}" if call else ""
        _put_text(self.memory, _CALL + _SINCE.size, LIVE, text)

    def put_end(self, text: str) -> None:
        """Record how the process ends, see `Record.ended`."""
        self._end = text
        _put_text(self.memory, _ENDING, STACK_SIGNAL, text)

    def remove(self) -> None:
        """Remove the record at the end of the process, or of a run without errors.

        If an operation failed or an exception ends the process, the record is kept, with the reason of the
        end, and all records of the job by this process. $COMMPLAN_KEEP_RECORDS keeps the record otherwise."""
        if os.getpid() != self.process:
            return  # a forked child leaves
        recordings = (self, *self._lanes.values())
        if self in _recordings:
            _recordings.remove(self)
            if _recordings:
                offer_stacks(_recordings[-1])
        job_recordings = [recording for recording in _recordings if recording.job == self.job]
        headers = (_HEADER.unpack_from(each.memory) for each in (*recordings, *job_recordings))
        failed = any(header[10] for header in headers)
        failed |= uncaught() is not None
        if failed or is_kept():
            for recording in recordings:
                _put_text(recording.memory, _ENDING, STACK_SIGNAL, self._end or _ending())
                # Python restores signal handlers before MPI ends: then the signal would end the process.
                struct.pack_into("<q", recording.memory, STACK_SIGNAL, 0)
            for recording in job_recordings if failed else ():
                struct.pack_into("<q", recording.memory, FAILURES, 1)
            return
        for recording in recordings:
            recording.path.unlink(missing_ok=True)


def uncaught() -> BaseException | None:
    """The exception that ends this process, other than `SystemExit`. For exit handlers."""
    error = getattr(sys, "last_value", None)
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return error if isinstance(error, BaseException) and not is_interactive else None


def _ending() -> str:
    error = uncaught()
    return f"has ended with {f'{type(error).__name__}: {error}'.splitlines()[0]}" if error else "has ended"


def path_of(job: str, rank: int, lane: str = "") -> Path:
    """The file of a rank's record, or of a lane of it."""
    return folder() / f"{prefix()}{job}.{rank}{'.' if lane else ''}{lane}.rec"


def is_kept() -> bool:
    """Whether records stay after a clean end."""
    return os.environ.get("COMMPLAN_KEEP_RECORDS", "0") not in ("", "0")


def start_recording(
    job: str, plan: str, rank: int, ranks: int, axes: Mapping[str, int] | None = None, lane: str = ""
) -> Recording | None:
    """A new record, which is removed if this process ends without an error; None, with a warning, if it
    cannot be created."""
    try:
        recording = Recording(job, plan, rank, ranks, axes, lane)
    except OSError as error:
        warnings.warn(f"this run is not recorded: {error}", RuntimeWarning, 3)
        return None
    _recordings.append(recording)
    offer_stacks(recording)
    atexit.register(recording.remove)
    return recording


def recording_of(plan: str | None) -> Recording | None:
    """The first record that runs of `plan` (None: of any plan) write in this process, if any."""
    return next((recording for recording in _recordings if plan in (None, recording.plan)), None)


def offer_stacks(recording: Recording) -> None:
    """Append the Python stacks of this process to `recording` on a signal, after `offer_stacks_of_process`.

    This works whatever its threads do, also if one is in C and holds the interpreter's lock. Stacks go to the
    record of the last call. The engine, which has only the descriptor, reads them there."""
    number = SIGNAL
    if not _offers:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if not number or (not _stacks and is_handled(number, "SigIgn:", "SigCgt:")):
            return  # another system, or the program handles the signal
        descriptor = io.open_file(recording.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            if _stacks:
                os.dup2(descriptor, _stacks[0][0], inheritable=False)
            else:
                faulthandler.register(number, descriptor, all_threads=True)
                _stacks.append((descriptor, number))
        finally:
            if (descriptor, number) not in _stacks:
                os.close(descriptor)
        struct.pack_into("<q", recording.memory, STACK_SIGNAL, number)


def offer_stacks_of_process() -> None:
    """Allow this process to install the handler of `SIGNAL`, see `offer_stacks`."""
    if not _offers:
        _offers.append(True)
        for recording in _recordings[-1:]:
            offer_stacks(recording)


def is_handled(number: int, *masks: str, process: int | str = "self") -> bool:
    """Whether a process handles (mask `SigCgt:`) or ignores (`SigIgn:`) a signal, in Python or in C. Raises
    OSError if there is no such process."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    words = [line.split()[1] for line in lines if line.startswith(masks)]
    return any(int(word, 16) >> (number - 1) & 1 for word in words)


_offers: list[bool] = []  # whether the program allows a handler of the signal
_stacks: list[tuple[int, int]] = []  # the descriptor to which they are written, and the signal
_recordings: list[Recording] = []
os.register_at_fork(after_in_child=_recordings.clear)


def put_name(memory: mmap.mmap | bytearray, index: int, text: str) -> None:
    """Set name `index` of a record to `text`. Names that do not fit share the last index."""
    index = min(index, MOST_NAMES - 1)
    memory[_HEADER.size + index * _NAME : _HEADER.size + (index + 1) * _NAME] = _padded(text)
    struct.pack_into("<q", memory, NAMES, max(index + 1, struct.unpack_from("<q", memory, NAMES)[0]))


def _put_text(memory: mmap.mmap, begin: int, end: int, text: str) -> None:
    """Write a text and a zero byte between `begin` and `end`. A longer text is truncated."""
    data = text.encode(errors="replace")[: end - begin - 2] + b"\0\0"
    memory[begin : begin + len(data)] = data


def append_end(path: Path, text: str, seconds: float) -> None:
    """Add the death of a process to its record, which is kept. seconds: when it died, on `time.monotonic`.

    The file is not mapped: truncating a file ends the processes that map it, by SIGBUS. Raises OSError, and
    ValueError for a file that is no complete record.
    """
    descriptor = io.open_file(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        data = os.pread(descriptor, _HEADER.size, 0)
        if os.fstat(descriptor).st_size < SIZE or data[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is not a record")
        _, version, *_, capacity, head, names, _, _, _, _ = _HEADER.unpack(data)
        if (version, capacity) != (VERSION, CAPACITY) or not (0 <= head < _EVENTS and 0 <= names < _EVENTS):
            raise ValueError(f"{path} is a damaged record")
        index = min(names, MOST_NAMES - 1)
        event = EVENT.pack(int(seconds * 1e9), GONE, index, 0, 0, 0)
        os.pwrite(descriptor, _padded(text), _HEADER.size + index * _NAME)
        os.pwrite(descriptor, event, EVENTS + EVENT.size * (head % CAPACITY))
        os.pwrite(descriptor, struct.pack("<3q", head + 1, max(index + 1, names), 1), HEAD)
    finally:
        os.close(descriptor)


def _padded(text: str) -> bytes:
    """The bytes of a name in a record."""
    return text.encode(errors="replace")[: _NAME - 1].ljust(_NAME, b"\0")


def _drop_stale(where: Path) -> None:
    """Remove this user's records of processes that ended long ago."""
    for path in where.glob(f"{prefix()}*.rec"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink()


def read_records(paths: Iterable[str]) -> list[Record]:
    """The records in files and folders, by rank and lane. Links in folders, records of other versions, and
    records that are being created are skipped. Raises CP1114 for a file that is not a record."""
    records: list[Record] = []
    for place in map(Path, paths):
        if place.is_dir():
            for path in sorted(place.glob(f"{prefix()}*.rec")):
                with contextlib.suppress(OSError):
                    data, after = _pieces(path, *_WHOLE, flags=os.O_NOFOLLOW)
                    # Before its process writes the record, the file is empty, or all zeros.
                    if data[: len(MAGIC)].strip(b"\0") and _version(data) == VERSION:
                        records.append(_record(path, data, after))
            continue
        try:
            data, after = _pieces(place, *_WHOLE)
        except OSError as error:
            fail("CP1114", f"{place} cannot be read: {error.strerror or error}", file=str(place))
        except ValueError as error:  # a NUL in the name
            fail("CP1114", f"{str(place)!r} cannot be read: {error}")
        records.append(_record(place, data, after))
    return sorted(records, key=lambda record: (record.plan, record.rank, record.lane))


def read_open(path: Path, descriptor: int) -> Record:
    """The record in an open file that may have been removed. Raises OSError, and CP1114 if it is damaged."""
    data, after = (os.pread(descriptor, size, begin) for begin, size in _WHOLE)
    return _record(path, data, after)


def _pieces(path: Path, *places: tuple[int, int], flags: int = os.O_RDONLY) -> list[bytes]:
    """The bytes of a file at `places`, (begin, size), read one after another. Raises OSError."""
    descriptor = io.open_file(path, flags)
    try:
        return [os.pread(descriptor, size, begin) for begin, size in places]
    finally:
        os.close(descriptor)


def _version(data: bytes) -> int:
    """The version of a record, at the same position in all versions; `VERSION` if this is not a record."""
    if data.startswith(MAGIC) and len(data) >= len(MAGIC) + 8:
        number: int = struct.unpack_from("<q", data, len(MAGIC))[0]
        return number
    return VERSION


def _record(path: Path, data: bytes, after: bytes) -> Record:
    """The record in a file that may still be written. after: its header, read after `data`."""
    if (version := _version(data)) != VERSION:
        message = f"{path} is a record of version {version}"
        fail("CP1114", message, f"this is version {VERSION}", file=str(path))
    if len(data) < SIZE or len(after) != _HEADER.size or data[: len(MAGIC)] != MAGIC:
        note = "expected a file that a run wrote, whole: *.rec"
        fail("CP1114", f"{path} is not a record of a rank", note, file=str(path))
    _, _, process, rank, ranks, unix_ns, boot_ns, capacity, head, count, failed, *texts = _HEADER.unpack_from(
        data
    )
    if capacity != CAPACITY:
        fail("CP1114", f"{path} is a damaged record: it has room for {capacity} events", file=str(path))
    if not 0 <= rank < ranks <= _RANKS:
        fail("CP1114", f"{path} is a damaged record: it is of rank {rank} of {ranks}", file=str(path))
    (host, lane), (space, _), (plan, sizes) = map(_texts, texts)
    # Events that were overwritten during the read are lost, and so is the slot that is written next.
    written = _HEADER.unpack_from(after)[8]
    lost = max(0, head - CAPACITY, written - CAPACITY + (written > head))
    events = sorted(_events(data, lost, head, count, unix_ns - boot_ns), key=lambda event: event.seconds)
    return Record(
        str(path), plan, rank, ranks, host, space, process, unix_ns / 1e9, bool(failed), lost, tuple(events),
        (unix_ns - boot_ns) / 1e9, _sizes(sizes, ranks), lane, _texts(data[_ENDING:STACK_SIGNAL])[0],
        _call(data[_CALL:LIVE], unix_ns - boot_ns),
    )  # fmt: skip


def read_call(path: Path) -> Call | None:
    """The call in the record of a process of this machine that may still run, with its seconds on
    `time.monotonic`."""
    with contextlib.suppress(OSError):
        return _call(_pieces(path, (_CALL, LIVE - _CALL))[0], 0)
    return None


def writer(record: Path) -> tuple[int, int]:
    """The process that writes a record, and the signal that requests its stacks; 0 for either if the process
    is not of this machine, or does not handle `SIGNAL`, the only one that counts. Raises OSError."""
    header, number = _pieces(record, (0, _HEADER.size), (STACK_SIGNAL, 8))
    if len(header) < _HEADER.size or len(number) < 8 or header[: len(MAGIC)] != MAGIC:
        return 0, 0
    _, _, process, *_, space, _ = _HEADER.unpack(header)
    if process <= 0 or _texts(space)[0] != machine():
        return 0, 0
    offered = struct.unpack("<q", number)[0] == SIGNAL and is_handled(SIGNAL, "SigCgt:", process=process)
    return process, SIGNAL if offered else 0


def _call(data: bytes, offset_ns: int) -> Call | None:
    if len(data) < _SINCE.size:
        return None
    text, stack = _texts(data[_SINCE.size :])
    return Call(text, (_SINCE.unpack_from(data)[0] + offset_ns) / 1e9, stack) if text else None


def _events(data: bytes, first: int, head: int, count: int, offset_ns: int) -> Iterator[Event]:
    """Events from `first` to before `head`, without damaged ones."""
    places = (_HEADER.size + _NAME * index for index in range(min(count, MOST_NAMES)))
    names = [_texts(data[at : at + _NAME]) for at in places]
    details = [_details(text) for _, text in names]
    for index in range(first, head):
        place = EVENTS + EVENT.size * (index % CAPACITY)
        nanoseconds, kind, name, operation, runs, nbytes = EVENT.unpack_from(data, place)
        if BEGIN <= kind <= ROUND and 0 <= name < len(names):
            when = (nanoseconds + offset_ns) / 1e9
            yield Event(when, kind, names[name][0], operation, runs, nbytes, details[name])


def _texts(field: bytes) -> tuple[str, str]:
    """A text that ends with a zero byte, and the text that follows it."""
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
    """The axes in `data=4,node=2`; empty if their product is not the number of ranks."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    sizes = {axis: int(size) for axis, _, size in pairs if size.isdecimal()}
    return sizes if math.prod(sizes.values()) == ranks else {}
