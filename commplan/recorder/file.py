"""The file that a rank records into: a header, names, and a ring of events."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from commplan import io

MAGIC, VERSION = b"commplan", 3
# Magic, version, process, rank, ranks, time of the start since 1970 and since boot (ns), slots of the ring,
# events written, names, whether an operation failed, host, machine, plan. A second text follows the zero byte
# that ends a text: the lane after the host, the axes after the plan (`data=4,node=2`), the `Details` after a
# name. The ring is followed by the end of the process, the signal that requests its Python stacks, which it
# appends to the file (0: none), and the current call of the user's code, with its begin (ns since boot).
HEADER = struct.Struct("<8s 10q 64s 128s 128s")
NAME, MOST_NAMES, CAPACITY = 128, 512, 8192
EVENT = struct.Struct("<6q")  # nanoseconds since boot, kind, name, operation, runs, nbytes
EVENTS = HEADER.size + NAME * MOST_NAMES  # the offset of the ring
ENDING = EVENTS + EVENT.size * CAPACITY
STACK_SIGNAL = ENDING + 504
CALL = STACK_SIGNAL + 8
LIVE = CALL + 3584  # the block of `recorder.live`
SIZE = LIVE + 4096
HEAD, NAMES, FAILURES = 64, 72, 80  # in the header: the events written, the names, whether one failed
BEGIN, END, FAILED, VERDICT, WAITED, GONE, ROUND = 1, 2, 3, 4, 5, 6, 7
_EVENTS = 2**62  # maximum number of events in a record
SIGNAL = signal.SIGRTMIN + 11  # the signal that requests the stacks of a process
_KEPT_S = 7 * 86400.0
SINCE = struct.Struct("<q")


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
        self.progress: object = None  # the step and the wait that were last written, see `JointCalls`
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
        HEADER.pack_into(self.memory, 0, MAGIC, *numbers, host, machine().encode()[:127], name)

    def lane(self, name: str) -> Recording:
        """The file of this lane, which is kept or removed with this one. Raises OSError."""
        if name not in self._lanes:
            self._lanes[name] = Recording(self.job, self.plan, self.rank, self.ranks, lane=name)
        return self._lanes[name]

    def put_call(self, call: Call | None) -> None:
        """Record a call of the user's code that takes long, its seconds on `time.monotonic`; None: there is
        none."""
        SINCE.pack_into(self.memory, CALL, int(call.seconds * 1e9) if call else 0)
        text = f"{call.text}\0{call.stack}" if call else ""
        _put_text(self.memory, CALL + SINCE.size, LIVE, text)

    def put_end(self, text: str) -> None:
        """Record how the process ends, see `Record.ended`."""
        self._end = text
        _put_text(self.memory, ENDING, STACK_SIGNAL, text)

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
        headers = (HEADER.unpack_from(each.memory) for each in (*recordings, *job_recordings))
        failed = any(header[10] for header in headers)
        failed |= uncaught() is not None
        if failed or is_kept():
            for recording in recordings:
                _put_text(recording.memory, ENDING, STACK_SIGNAL, self._end or _ending())
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
        if not _stacks and is_handled(number, "SigIgn:", "SigCgt:"):
            return  # the program handles the signal
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
    memory[HEADER.size + index * NAME : HEADER.size + (index + 1) * NAME] = _padded(text)
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
        data = os.pread(descriptor, HEADER.size, 0)
        if os.fstat(descriptor).st_size < SIZE or data[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is not a record")
        _, version, *_, capacity, head, names, _, _, _, _ = HEADER.unpack(data)
        if (version, capacity) != (VERSION, CAPACITY) or not (0 <= head < _EVENTS and 0 <= names < _EVENTS):
            raise ValueError(f"{path} is a damaged record")
        index = min(names, MOST_NAMES - 1)
        event = EVENT.pack(int(seconds * 1e9), GONE, index, 0, 0, 0)
        os.pwrite(descriptor, _padded(text), HEADER.size + index * NAME)
        os.pwrite(descriptor, event, EVENTS + EVENT.size * (head % CAPACITY))
        os.pwrite(descriptor, struct.pack("<3q", head + 1, max(index + 1, names), 1), HEAD)
    finally:
        os.close(descriptor)


def _padded(text: str) -> bytes:
    """The bytes of a name in a record."""
    return text.encode(errors="replace")[: NAME - 1].ljust(NAME, b"\0")


def _drop_stale(where: Path) -> None:
    """Remove this user's records of processes that ended long ago."""
    for path in where.glob(f"{prefix()}*.rec"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink()
