"""The record file of a rank: its layout, its Python types, and `Recording`, which creates and removes it.

The file has a header, names, a ring of events, texts about the end of the process, and the block of
`recorder.live`. `recorder.reading` reads it, `recorder.lane` and the engine write events.
`lowering/mpi/engine/recorder.cpp` has the same layout.
"""

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

MAGIC = b"commplan"  # the first bytes of a record
VERSION = 3  # of the layout

# The header: magic, version, process, rank, ranks, start (nanoseconds since 1970), start (nanoseconds since
# boot), slots of the ring, events written, names written, whether an operation failed, host, machine, plan.
# A field of text may have a second text after a zero byte: the lane after the host, and the axes after the
# plan (`data=4,node=2`). In the same way, `Details` follow a name.
HEADER = struct.Struct("<8s 10q 64s 128s 128s")
HEAD = 64  # offset in the header: the number of events written, including those that were overwritten
NAMES = 72  # offset in the header: the number of names
FAILURES = 80  # offset in the header: 1 if an operation failed, else 0

NAME = 128  # bytes of a name, with its zero byte
MOST_NAMES = 512  # maximum number of names
EVENT = struct.Struct("<6q")  # nanoseconds since boot, kind, number of the name, operation, runs, nbytes
CAPACITY = 8192  # slots of the ring

# Offsets in the file, in bytes.
EVENTS = HEADER.size + NAME * MOST_NAMES  # the ring
ENDING = EVENTS + EVENT.size * CAPACITY  # how the process ended, a text
STACK_SIGNAL = ENDING + 504  # the signal on which the process appends its Python stacks; 0 if there is none
CALL = STACK_SIGNAL + 8  # the current call of the user's code: `SINCE`, then its text and its stack
LIVE = CALL + 3584  # the block of `recorder.live`
SIZE = LIVE + 4096  # the size of the file without stacks, which are appended
SINCE = struct.Struct("<q")  # when a call began, in nanoseconds since boot

# Kinds of events, see `Event`.
BEGIN = 1
END = 2
FAILED = 3
VERDICT = 4
WAITED = 5
GONE = 6
ROUND = 7

SIGNAL = signal.SIGRTMIN + 11  # the signal that requests the stacks of a process
_EVENTS = 2**62  # limit of the numbers of events and names in an intact record
_KEPT_S = 7 * 86400.0  # seconds since the last write after which a record is removed


class Details(NamedTuple):
    """The static properties of a collective, or of an operation of a lane.

    Attributes:
        kind: The kind of collective, such as `all_reduce`, or a `lane.Kind`.
        algorithm: The algorithm of a collective. In a lane: a word that is equal on all ranks that share the
            operation; `-` if there is none.
        nbytes: The bytes of the whole buffer; of a request, those of the request and its answer; else 0.
        dtype: The dtype of the buffer; `-` in a lane.
        root: The position of the root along `axes`, or the distance of a `shift`; 0 for other kinds.
        opens: The phase whose first collective this is; else empty. Its runs are the runs of the phase.
        axes: The mesh axes along which its ranks communicate; empty in a lane.
    """

    kind: str
    algorithm: str
    nbytes: int
    dtype: str
    root: int
    opens: str
    axes: tuple[str, ...]

    def text(self) -> str:
        """Return the recorded form: seven words, truncated to 100 of the 127 bytes of a name."""
        start = f"{self.kind} {self.algorithm} {self.nbytes} {self.dtype} {self.root}"
        return f"{start} {self.opens or '-'} {','.join(self.axes)}".encode()[:100].decode(errors="ignore")


class Event(NamedTuple):
    """An event of an operation or of the process.

    Attributes:
        seconds: Its time, in seconds since 1970.
        kind: One of:

            - `BEGIN`, `END`, `FAILED`: an operation begins, ends or fails.
            - `VERDICT`: `name` is the verdict of a watchdog.
            - `WAITED`: the program has waited `nbytes` nanoseconds for an operation that began earlier.
            - `GONE`: the process has died. `name` describes how; the sidecar of its host wrote it.
            - `ROUND`: the operation has moved no data for a second. `runs` and `nbytes` are packed, see
              `blame.Progress`.
        name: The name of the operation, such as `line 7 of x.plan`.
        operation: The number of the operation on this rank, from 1; 0 if the event has none.
        runs: The number of operations with this name so far, including this one.
        nbytes: The bytes that the operation moves on this rank. In a lane, see `lane.Lane.begin`.
        details: The details that follow the name; None if there are none, or if they are damaged.
    """

    seconds: float
    kind: int
    name: str
    operation: int
    runs: int
    nbytes: int
    details: Details | None = None


class Call(NamedTuple):
    """A call of the user's code that has not returned.

    Attributes:
        text: Its description.
        seconds: When it was first observed, in seconds since 1970. Some functions state that it is on
            `time.monotonic` instead.
        stack: Its Python stack in one line, innermost frame first; empty if unknown.
    """

    text: str
    seconds: float
    stack: str = ""

    def sentence(self, now: float) -> str:
        """Return the end of a sentence about its process. `now` is on the same clock as `seconds`."""
        python = f"; its Python: {self.stack}" if self.stack else ""
        return f"in {self.text}, for {now - self.seconds:.1f} s{python}"


class Record(NamedTuple):
    """The record of one rank.

    Attributes:
        path: The file.
        plan: The name of the plan.
        rank, ranks: The rank, and the number of ranks of the job.
        host: The host name.
        machine: The result of `machine()` in the process.
        process: The process number on `host`.
        started: When the record was created, in seconds since 1970.
        failed: Whether an operation failed or an exception ended the process.
        lost: The number of events that the ring has dropped.
        events: The other events, in order of their time.
        clock: When `time.monotonic` of this machine was 0, in seconds since 1970, measured by this process.
        axes: The size of each mesh axis. Ranks are in row-major order on this grid. Empty if unknown.
        lane: `input`, `feed`, `requests` or `server`; empty for collectives.
        ended: How the process exited, for a message; empty if it died or runs.
        call: A call of the user's code that takes long; None if there is none. If the process records whole
            steps, the text of a `rank_state.Comparison` takes its place.
    """

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
    """The prefix of the file names of this user's records."""
    return f"commplan-{os.getuid()}-"


def machine() -> str:
    """A text that is equal for processes that share process numbers: boot id, then PID name space.

    The host name if `/proc` does not have them.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname()


class Recording:
    """A new record file that this process maps.

    Attributes:
        path: The file.
        memory: The mapped file, `SIZE` bytes.
        process: The number of the process that created it. A forked child has another one.
        progress: The step and the wait that were last written, see `JointCalls`; None before.

    Args:
        job: A word in the name of the file, equal on all ranks of the job, without dots and hyphens.
        plan: The name of the plan. At most 127 bytes are stored.
        rank, ranks: The rank, and the number of ranks of the job.
        axes: The size of each mesh axis. Not stored if they do not fit in the header after the plan.
        lane: See `Record`.

    Raises:
        OSError: If the file exists, or cannot be created or mapped.
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
        self.process, self._end = os.getpid(), ""  # the latter: the text of `put_end`
        self.path = path_of(job, rank, lane)
        self._lanes: dict[str, Recording] = {}
        self.progress: object = None
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
        """Return the file of a lane, created on the first call. It is kept or removed with this one.

        Raises:
            OSError: If it cannot be created.
        """
        if name not in self._lanes:
            self._lanes[name] = Recording(self.job, self.plan, self.rank, self.ranks, lane=name)
        return self._lanes[name]

    def put_call(self, call: Call | None) -> None:
        """Record a call of the user's code that takes long, with its `seconds` on `time.monotonic`.

        None removes the recorded call.
        """
        SINCE.pack_into(self.memory, CALL, int(call.seconds * 1e9) if call else 0)
        text = f"{call.text}\0{call.stack}" if call else ""
        _put_text(self.memory, CALL + SINCE.size, LIVE, text)

    def put_end(self, text: str) -> None:
        """Record how the process ends, see `Record.ended`. `remove` keeps this text."""
        self._end = text
        _put_text(self.memory, ENDING, STACK_SIGNAL, text)

    def remove(self) -> None:
        """Remove the record and its lanes, at the end of the process or of a run without errors.

        If an operation failed or an exception ends the process, the files are kept, with the reason of the
        end, and so are the other records of the job by this process. Without a failure, they are also kept if
        `is_kept()`. In a forked child, this has no effect.
        """
        if os.getpid() != self.process:
            return  # a forked child leaves
        recordings = (self, *self._lanes.values())
        if self in _recordings:
            _recordings.remove(self)
            if _recordings:
                offer_stacks(_recordings[-1])
        job_recordings = [recording for recording in _recordings if recording.job == self.job]
        every = (*recordings, *job_recordings)
        failed = any(struct.unpack_from("<q", recording.memory, FAILURES)[0] for recording in every)
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
    """The exception that ends this process, for exit handlers.

    None if there is none, after `SystemExit`, and in an interactive session.
    """
    error = getattr(sys, "last_value", None)
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return error if isinstance(error, BaseException) and not is_interactive else None


def _ending() -> str:
    """The predicate of a message about the end of this process, see `Record.ended`."""
    error = uncaught()
    return f"has ended with {f'{type(error).__name__}: {error}'.splitlines()[0]}" if error else "has ended"


def path_of(job: str, rank: int, lane: str = "") -> Path:
    """The file of a rank's record of collectives, or of its record of `lane`."""
    return folder() / f"{prefix()}{job}.{rank}{'.' if lane else ''}{lane}.rec"


def is_kept() -> bool:
    """Whether records are kept after an end without errors: $COMMPLAN_KEEP_RECORDS is neither empty nor 0."""
    return os.environ.get("COMMPLAN_KEEP_RECORDS", "0") not in ("", "0")


def start_recording(
    job: str, plan: str, rank: int, ranks: int, axes: Mapping[str, int] | None = None, lane: str = ""
) -> Recording | None:
    """Create a record, on which `Recording.remove` is called at the end of this process.

    For the arguments, see `Recording`.

    Returns:
        The record; None, with a RuntimeWarning, if it cannot be created.
    """
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
    """The first record of this process for `plan`, or for any plan if it is None; None if there is none."""
    return next((recording for recording in _recordings if plan in (None, recording.plan)), None)


def offer_stacks(recording: Recording) -> None:
    """Make this process append its Python stacks to `recording` whenever it receives `SIGNAL`.

    Has no effect before `offer_stacks_of_process`, if the program handles or ignores the signal itself, or if
    the file cannot be opened. Only the record of the last call receives stacks. The handler runs in C: it
    does not need the interpreter's lock, which another thread may hold.
    """
    number = SIGNAL
    if not _offers:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if not _stacks and is_handled(number, "SigIgn:", "SigCgt:"):
            return  # the program handles the signal
        descriptor = io.open_file(recording.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            if _stacks:  # the handler keeps its descriptor, which now refers to this record
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
    """Whether a process handles or ignores a signal, in Python or in C.

    Args:
        number: The signal.
        masks: Fields of `/proc/PID/status`: `SigCgt:` for handled signals, `SigIgn:` for ignored ones.
        process: The process number; by default this process.

    Raises:
        OSError: If there is no such process.
    """
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    words = [line.split()[1] for line in lines if line.startswith(masks)]
    return any(int(word, 16) >> (number - 1) & 1 for word in words)


_offers: list[bool] = []  # non-empty if the program allows a handler of `SIGNAL`
_stacks: list[tuple[int, int]] = []  # once it is installed: the descriptor to which it writes, and the signal
_recordings: list[Recording] = []  # of this process, without lanes, in order of their creation
os.register_at_fork(after_in_child=_recordings.clear)


def put_name(memory: mmap.mmap | bytearray, index: int, text: str) -> None:
    """Set the name with number `index` to `text`. Indices from `MOST_NAMES` on overwrite the last name."""
    index = min(index, MOST_NAMES - 1)
    memory[HEADER.size + index * NAME : HEADER.size + (index + 1) * NAME] = _padded(text)
    struct.pack_into("<q", memory, NAMES, max(index + 1, struct.unpack_from("<q", memory, NAMES)[0]))


def _put_text(memory: mmap.mmap, begin: int, end: int, text: str) -> None:
    """Write `text` and two zero bytes between the offsets `begin` and `end`. A longer text is truncated."""
    data = text.encode(errors="replace")[: end - begin - 2] + b"\0\0"
    memory[begin : begin + len(data)] = data


def append_end(path: Path, text: str, seconds: float) -> None:
    """Add the death of a process to its record.

    The file is not mapped: if its owner truncates it, a process that maps it receives SIGBUS.

    Args:
        path: The record.
        text: How the process died, for a message.
        seconds: When it died, on `time.monotonic`.

    Raises:
        OSError: If the file cannot be read or written.
        ValueError: If it is not a complete record of this version.
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


def _drop_stale(directory: Path) -> None:
    """Remove this user's records that were last written more than `_KEPT_S` ago."""
    for path in directory.glob(f"{prefix()}*.rec"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink()
