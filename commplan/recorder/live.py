"""The live block of a record: the sidecar of the host reads it while the process runs, and writes verdicts.

Functions that take a `Recording` run in the process itself. Those that take a descriptor run in the sidecar:
they use `pread` and `pwrite`, because a mapping of a truncated file would end the sidecar. The engine has the
same layout (`Live` in `lowering/mpi/engine/watch.h`).
"""

from __future__ import annotations

import os
import re
import struct
import time
from typing import NamedTuple

from commplan.diagnostics import Diagnostic, Note
from commplan.hang_limits import HangLimits
from commplan.recorder.file import LIVE, Recording

_NUMBERS = struct.Struct("<16q")  # the fields of `Live`, with which the block begins

# Offsets of fields in the file. Fields of 8 bytes follow each other in the order of `Live`.
_LEFT = LIVE + 24
_LATE = LIVE + 32
_LIMITS = LIVE + 40  # `bound_ns` and `busy_ns`
_SERVED = LIVE + 56
_FLAGS = LIVE + 64
_ENDS = LIVE + 72
_COMPARISON = LIVE + 80  # `compares`, `comparison` and `group`
_ASKS = LIVE + 104
_BEAT = LIVE + 112
_ANSWERED = LIVE + 120
_VERDICT = LIVE + 128  # when the verdict applies (0: there is none), and whether it is `abandoned`
_TEXT = LIVE + 144  # the verdict and the line that waited, each with a zero byte
_END = LIVE + 4096  # the end of the block
_LONGEST = 3952 - 3  # maximum bytes of both texts without zero bytes; 3952 is `_END - _TEXT`

_SERVED_S = 1.0  # seconds without a report until a server counts as busy
_FROZEN_S = 1.5  # seconds without a beat until another thread counts as holding the interpreter's lock

# Bits of `Live.flags`.
_WAITS = 1  # of a server: workers wait for other workers
_PATIENT = 2  # of a server: this wait has a timeout
_AHEAD = 4  # a step is traced, compiled or compared
_ABORTED = 8  # the runtime aborts the process

LEFT = 2  # the value of `Live.left` after the rank has left
BLOCKED = "CP0834"  # the default code of a verdict
_CODE = re.compile(r"(CP\d{4}): ")  # the code with which the text of a verdict may begin
_ALL = (1 << 32) - 1  # see `position`


class Live(NamedTuple):
    """The state of a recording process. Times are `time.monotonic_ns`.

    Attributes:
        moved: The time at which an operation last began, moved bytes or ended.
        waits: The time at which the oldest unfinished operation began; 0 if there is none.
        parting: The time since which the rank waits for the others to leave, or a server has received
            nothing; 0 before.
        left: 1 if the rank begins no further operation, `LEFT` if it has left; 0 before.
        late: The number of nested `late` blocks in which the program is.
        bound_ns: The limit `watchdog_s` in nanoseconds; 0 if the record is not watched.
        busy_ns: The limit `busy_s` in nanoseconds.
        served: The time at which a server last reported its state; 0 if this is not a server.
        flags: The bits `_WAITS`, `_PATIENT`, `_AHEAD` and `_ABORTED`.
        ends: 1 if a verdict ends operations, see `on_hang` of `Program.bind`; else 0.
        compares: The time since which the rank waits for others to compare a step; 0 if it does not wait.
        comparison: The progress in steps that are compared, see `position`; 0 before.
        group: The axes along which ranks compare steps, see `put_comparison`.
        asks: The time at which a step failed, for a reason that other processes may have caused; 0 before.
        beat: The time at which the thread that records the ends of steps last ran; 0 if there is none.
        answered: The time at which the sidecar last found no other process that explains the failure at
            `asks`; 0 before.
    """

    moved: int = 0
    waits: int = 0
    parting: int = 0
    left: int = 0
    late: int = 0
    bound_ns: int = 0
    busy_ns: int = 0
    served: int = 0
    flags: int = 0
    ends: int = 0
    compares: int = 0
    comparison: int = 0
    group: int = 0
    asks: int = 0
    beat: int = 0
    answered: int = 0

    @property
    def bound_s(self) -> float:
        """The limit `watchdog_s`; 0 if the record is not watched."""
        return self.bound_ns * 1e-9

    @property
    def busy_s(self) -> float:
        """The limit `busy_s` in seconds."""
        return self.busy_ns * 1e-9

    @property
    def is_frozen(self) -> bool:
        """Whether the thread that records the ends of steps has not run for `_FROZEN_S` seconds."""
        return bool(self.beat) and time.monotonic_ns() - self.beat > _FROZEN_S * 1e9

    @property
    def is_ahead(self) -> bool:
        """Whether a step is traced, compiled or compared."""
        return bool(self.flags & _AHEAD)

    @property
    def is_aborted(self) -> bool:
        """Whether the runtime aborts the process."""
        return bool(self.flags & _ABORTED)

    @property
    def serves(self) -> bool:
        """Whether the process is a server that has reported within the last `_SERVED_S` seconds."""
        return time.monotonic_ns() - self.served < _SERVED_S * 1e9

    @property
    def is_comparing(self) -> bool:
        """Whether the rank waits for others to compare a step, and for no operation."""
        return self.compares > 0 and not self.waits

    @property
    def is_patient(self) -> bool:
        """Whether the process is such a server (`serves`), and its wait for workers has a timeout."""
        return self.serves and bool(self.flags & _PATIENT)


def read_live(descriptor: int) -> Live:
    """Read the numbers of the block in an open record.

    Raises:
        OSError: If the file cannot be read.
        struct.error: If the file is too short.
    """
    return Live(*_NUMBERS.unpack(os.pread(descriptor, _NUMBERS.size, LIVE)))


def put_limits(recording: Recording, limits: HangLimits) -> None:
    """Make the sidecar watch the process of `recording` with these limits, unless `watchdog_s` is None."""
    struct.pack_into("<q", recording.memory, LIVE, time.monotonic_ns())
    bound_ns, busy_ns = int((limits.watchdog_s or 0.0) * 1e9), int(limits.busy_s * 1e9)
    struct.pack_into("<2q", recording.memory, _LIMITS, bound_ns, busy_ns)
    struct.pack_into("<q", recording.memory, _ENDS, limits.on_hang == "abort")


def put_late(recording: Recording, late: int) -> None:
    """Report the number of nested `late` blocks in which the program is."""
    struct.pack_into("<q", recording.memory, _LATE, late)


def put_served(recording: Recording, *, waits: bool, patient: bool, moved: bool) -> None:
    """Report the state of a server.

    Args:
        recording: The record of the server.
        waits: Whether workers wait for other workers.
        patient: Whether that wait has a timeout.
        moved: Whether a message has arrived since the last report.
    """
    now = time.monotonic_ns()
    if moved or not struct.unpack_from("<q", recording.memory, _SERVED)[0]:
        struct.pack_into("<3q", recording.memory, LIVE, now, 0, now)  # `moved`, `waits` and `parting`
    struct.pack_into("<2q", recording.memory, _SERVED, now, waits * _WAITS + patient * _PATIENT)


def put_step(recording: Recording, moved_s: float, waits_ns: int) -> None:
    """Report the last step of a process that records whole steps.

    Args:
        recording: The record of the process.
        moved_s: When the step began or ended, on `time.monotonic`.
        waits_ns: When it began, on `time.monotonic_ns`, if it has not ended; else 0.
    """
    struct.pack_into("<2q", recording.memory, LIVE, int(moved_s * 1e9), waits_ns)
    struct.pack_into("<q", recording.memory, _BEAT, time.monotonic_ns())


def position(call: int, exchange: int = _ALL) -> int:
    """A number that grows with the progress of a rank in calls that ranks compare.

    Args:
        call: The number of the call.
        exchange: The number of the message exchange in its comparison, below 2**32 - 1. The default means
            that the call has been compared, and runs or has ended.
    """
    return call << 32 | exchange


def put_comparison(
    recording: Recording, comparison: int, since_s: float | None, group: int = 0, *, is_ahead: bool
) -> None:
    """Report the progress of a process in calls that ranks compare.

    Args:
        recording: The record of the process.
        comparison: A result of `position`.
        since_s: Since when it waits for others to compare, on `time.monotonic`; None if it does not wait.
        group: The axes of the record along which ranks make the calls together: bit 0 for its first axis.
        is_ahead: Whether the call is traced, compiled or compared.
    """
    since_ns = 0 if since_s is None else int(since_s * 1e9)
    struct.pack_into("<3q", recording.memory, _COMPARISON, since_ns, comparison, group)
    (flags,) = struct.unpack_from("<q", recording.memory, _FLAGS)
    struct.pack_into("<q", recording.memory, _FLAGS, flags & ~_AHEAD | is_ahead * _AHEAD)


def put_failure(recording: Recording, *, is_aborted: bool) -> None:
    """Request that the sidecar checks whether a step failed because of another process.

    Args:
        recording: The record of the process.
        is_aborted: Whether JAX aborts this process.
    """
    (flags,) = struct.unpack_from("<q", recording.memory, _FLAGS)
    struct.pack_into("<q", recording.memory, _FLAGS, flags | is_aborted * _ABORTED)
    struct.pack_into("<q", recording.memory, _ASKS, time.monotonic_ns())


def is_answered(recording: Recording) -> bool:
    """Whether the sidecar has found no other process that explains the last `put_failure`."""
    asks, _, answered = struct.unpack_from("<3q", recording.memory, _ASKS)
    return answered > asks


def write_answer(descriptor: int) -> None:
    """Write to an open record that no other process explains its failure. Raises OSError."""
    os.pwrite(descriptor, struct.pack("<q", time.monotonic_ns()), _ANSWERED)


def put_left(recording: Recording) -> None:
    """Report that this process has left: it begins no further operation."""
    struct.pack_into("<q", recording.memory, _LEFT, LEFT)


def write_verdict(descriptor: int, text: str, line: str, effective_s: float, *, abandoned: bool) -> None:
    """Write a verdict to an open record.

    Args:
        descriptor: The file descriptor of the record.
        text: The verdict: a line, which may begin with the code of the error and `: `, then a line for each
            note. It and `line` are truncated to `_LONGEST` bytes together.
        line: The line of the plan that waited; empty if none did.
        effective_s: The `time.monotonic` from which the verdict applies.
        abandoned: Whether the rank waits for others to leave that will not leave.

    Raises:
        OSError: If the file cannot be written.
    """
    data = text.encode(errors="replace")[:_LONGEST] + b"\0"
    os.pwrite(descriptor, data + line.encode(errors="replace")[: _LONGEST + 1 - len(data)] + b"\0", _TEXT)
    os.pwrite(descriptor, struct.pack("<2q", int(effective_s * 1e9), abandoned), _VERDICT)


class WrittenVerdict(NamedTuple):
    """A verdict of the sidecar.

    Attributes:
        code: The code of its error, such as `CP0834`.
        message: The message of its error.
        notes: The notes of its error, without `note: `.
        line: The line of the plan that waited; empty if none did.
    """

    code: str
    message: str
    notes: tuple[str, ...]
    line: str

    @property
    def diagnostic(self) -> Diagnostic:
        """The error, without a location."""
        return Diagnostic(self.code, self.message, None, tuple(map(Note, self.notes)))


def verdict_of(recording: Recording) -> WrittenVerdict | None:
    """The verdict in the record of this process; None if there is none, or if it does not apply yet."""
    (effective,) = struct.unpack_from("<q", recording.memory, _VERDICT)
    if not effective or time.monotonic_ns() < effective:
        return None
    texts = recording.memory[_TEXT:_END].split(b"\0")[:2]
    text, line = (each.decode(errors="replace") for each in texts)
    code = _CODE.match(text)
    message, *notes = text[code.end() if code else 0 :].splitlines()
    notes = tuple(note.removeprefix("note: ") for note in notes)
    return WrittenVerdict(code[1] if code else BLOCKED, message, notes, line)
