"""The live block of a record: the sidecar of the host reads it while the process runs, and writes verdicts.

The engine has the same layout (`Live` in `lowering/mpi/engine/watch.h`). Readers use `pread`, because a
mapping of a truncated file would end the process that reads it.
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

_NUMBERS = struct.Struct("<16q")
_LATE, _LIMITS, _SERVED, _COMPARISON = LIVE + 32, LIVE + 40, LIVE + 56, LIVE + 80
_FLAGS, _ASKS, _BEAT, _ANSWERED = LIVE + 64, LIVE + 104, LIVE + 112, LIVE + 120
_VERDICT, _TEXT = LIVE + 128, LIVE + 144
_LONGEST = 3952 - 3  # maximum bytes of a verdict and of the waiting line, each with a zero byte
_SERVED_S = 1.0  # seconds without a report until a server counts as busy
_FROZEN_S = 1.5  # seconds without a beat until a thread counts as holding the lock
_WAITS, _PATIENT, _AHEAD, _ABORTED = 1, 2, 4, 8
LEFT = 2
BLOCKED = "CP0834"  # the default code of a verdict
_CODE = re.compile(r"(CP\d{4}): ")
_ALL = (1 << 32) - 1


class Live(NamedTuple):
    """The state of a recording process. Times are `time.monotonic_ns`.

    Attributes:
        moved: The time at which an operation last began, moved bytes or ended.
        waits: The time at which the oldest unfinished operation began; 0 if there is none.
        parting: The time since which the rank waits for the others to leave, or a server has received
            nothing; 0 before.
        left: 1 if the rank begins no further operation, `LEFT` if it has left.
        late: The number of `late` blocks that the program is in.
        bound_ns, busy_ns: The limits `watchdog_s` and `busy_s`; 0 if the record is not watched.
        served: The time at which a server last reported its state; 0 if this is not a server.
        flags: Of a server, whether workers wait for others, and whether it has a timeout for that. Of a
            process that records whole steps, whether it prepares a step, and whether its runtime aborts it.
        ends: Whether a verdict ends operations, see `on_hang` of `Program.bind`.
        compares: The time since which the rank waits for others to compare a step; 0 if it does not wait.
        comparison, group: See `put_comparison`.
        asks: The time at which a step failed, for a reason that other processes may know; 0 before.
        beat: The time at which the thread that records the ends of steps last ran; 0 if there is none.
        answered: The time at which the sidecar last found no other process that explains `asks`.
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
        return self.bound_ns * 1e-9

    @property
    def busy_s(self) -> float:
        return self.busy_ns * 1e-9

    @property
    def is_frozen(self) -> bool:
        """Whether the process cannot record ends of steps."""
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
        """Whether the process is a server that is not busy."""
        return time.monotonic_ns() - self.served < _SERVED_S * 1e9

    @property
    def is_comparing(self) -> bool:
        """Whether the rank waits for others to compare a step, and for no operation."""
        return self.compares > 0 and not self.waits

    @property
    def is_patient(self) -> bool:
        """Whether a server waits with a timeout."""
        return self.serves and bool(self.flags & _PATIENT)


def read_live(descriptor: int) -> Live:
    """The block in an open record. Raises OSError, and `struct.error` if the file is too short."""
    return Live(*_NUMBERS.unpack(os.pread(descriptor, _NUMBERS.size, LIVE)))


def put_limits(recording: Recording, limits: HangLimits) -> None:
    """Have the sidecar watch the process of `recording`, unless `watchdog_s` is None."""
    struct.pack_into("<q", recording.memory, LIVE, time.monotonic_ns())
    bound_ns, busy_ns = int((limits.watchdog_s or 0.0) * 1e9), int(limits.busy_s * 1e9)
    struct.pack_into("<2q", recording.memory, _LIMITS, bound_ns, busy_ns)
    struct.pack_into("<q", recording.memory, LIVE + 72, limits.on_hang == "abort")


def put_late(recording: Recording, late: int) -> None:
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
        struct.pack_into("<3q", recording.memory, LIVE, now, 0, now)
    struct.pack_into("<2q", recording.memory, _SERVED, now, waits * _WAITS + patient * _PATIENT)


def put_step(recording: Recording, moved_s: float, waits_ns: int) -> None:
    """Report the last step of a process that records whole steps.

    Args:
        recording: The record of the process.
        moved_s: The time at which the step began or ended.
        waits_ns: The time at which it began if it has not ended, else 0.
    """
    struct.pack_into("<2q", recording.memory, LIVE, int(moved_s * 1e9), waits_ns)
    struct.pack_into("<q", recording.memory, _BEAT, time.monotonic_ns())


def position(call: int, exchange: int = _ALL) -> int:
    """A number that grows with the progress of a rank in joint calls: `exchange` of the comparison of `call`.

    By default the call has been compared, and runs or has ended.
    """
    return call << 32 | exchange


def put_comparison(
    recording: Recording, comparison: int, since_s: float | None, group: int = 0, *, is_ahead: bool
) -> None:
    """Report the progress of a process in joint calls, which are compared.

    Args:
        comparison: See `position`.
        since_s: Since when it waits for others to compare, on `time.monotonic`; None if it does not.
        group: The axes of the record along which the ranks lie that make the calls: bit 0 for its first axis.
        is_ahead: Whether the call is traced, compiled or compared.
    """
    since_ns = 0 if since_s is None else int(since_s * 1e9)
    struct.pack_into("<3q", recording.memory, _COMPARISON, since_ns, comparison, group)
    (flags,) = struct.unpack_from("<q", recording.memory, _FLAGS)
    struct.pack_into("<q", recording.memory, _FLAGS, flags & ~_AHEAD | is_ahead * _AHEAD)


def put_failure(recording: Recording, *, is_aborted: bool) -> None:
    """Request the sidecar to check whether a step failed because of another process.

    Args:
        recording: The record of the process.
        is_aborted: Whether JAX aborts this process.
    """
    (flags,) = struct.unpack_from("<q", recording.memory, _FLAGS)
    struct.pack_into("<q", recording.memory, _FLAGS, flags | is_aborted * _ABORTED)
    struct.pack_into("<q", recording.memory, _ASKS, time.monotonic_ns())


def is_answered(recording: Recording) -> bool:
    """Whether the sidecar has found no other process that explains the failure."""
    asks, _, answered = struct.unpack_from("<3q", recording.memory, _ASKS)
    return answered > asks


def write_answer(descriptor: int) -> None:
    """Write to an open record that no other process explains its failure."""
    os.pwrite(descriptor, struct.pack("<q", time.monotonic_ns()), _ANSWERED)


def put_left(recording: Recording) -> None:
    """Report that this process begins no further operation."""
    struct.pack_into("<q", recording.memory, LIVE + 24, LEFT)


def write_verdict(descriptor: int, text: str, line: str, effective_s: float, *, abandoned: bool) -> None:
    """Write a verdict to an open record.

    Args:
        descriptor: The file descriptor of the record.
        text: The verdict.
        line: The line of the plan that waited.
        effective_s: The `time.monotonic` from which the verdict applies.
        abandoned: Whether the rank waits for others to leave that will not leave.
    """
    data = text.encode(errors="replace")[:_LONGEST] + b"\0"
    os.pwrite(descriptor, data + line.encode(errors="replace")[: _LONGEST + 1 - len(data)] + b"\0", _TEXT)
    os.pwrite(descriptor, struct.pack("<2q", int(effective_s * 1e9), abandoned), _VERDICT)


class WrittenVerdict(NamedTuple):
    """A verdict of the sidecar.

    Attributes:
        code: The code of its error.
        line: The line of the plan that waited; empty if none did.
    """

    code: str
    message: str
    notes: tuple[str, ...]
    line: str

    @property
    def diagnostic(self) -> Diagnostic:
        return Diagnostic(self.code, self.message, None, tuple(map(Note, self.notes)))


def verdict_of(recording: Recording) -> WrittenVerdict | None:
    """The verdict in the record of this process, once it applies; else None."""
    (effective,) = struct.unpack_from("<q", recording.memory, _VERDICT)
    if not effective or time.monotonic_ns() < effective:
        return None
    texts = recording.memory[_TEXT : LIVE + 4096].split(b"\0")[:2]
    text, line = (each.decode(errors="replace") for each in texts)
    code = _CODE.match(text)
    message, *notes = text[code.end() if code else 0 :].splitlines()
    notes = tuple(note.removeprefix("note: ") for note in notes)
    return WrittenVerdict(code[1] if code else BLOCKED, message, notes, line)
