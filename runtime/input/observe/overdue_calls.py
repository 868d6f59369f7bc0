"""Calls of user code that do not return: a source that hangs, a host function that waits.

Calls that return have no overhead. A thread that has waited for a batch inspects the stacks of the threads
that make batches, and remembers the call of each. A call that stays the same for longer than the bound is
overdue.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.ir.schedule import Read
from commplan.runtime.input.observe.wait_log import START_S, WaitReporter, log_warning
from commplan.runtime.input.stages.user_calls import Call, call_in

if TYPE_CHECKING:
    from commplan.recorder.file import Call as RecordedCall

Find = Callable[[FrameType | None], Call | None]  # finds a call, from the innermost frame of a thread


@dataclass
class OverdueCalls:
    """Detects overdue calls in the threads that make a phase's batches.

    Attributes:
        bound_s: seconds that a call may take.
        file: the file of the plan.
        in_worker: finds the call in the worker process for which a thread waits.
        ask_worker: makes a worker process print its stack, by its process number.
    """

    bound_s: float
    file: str
    in_worker: Find = lambda frame: None
    ask_worker: Callable[[int], None] = lambda process: None
    # The call in which each thread was last seen, by its number, and when it was first seen there.
    _since: dict[int, tuple[Call, float]] = field(init=False, default_factory=dict[int, tuple[Call, float]])
    _reporter: WaitReporter = field(init=False, default_factory=lambda: WaitReporter(START_S))

    def look(self, threads: Sequence[threading.Thread]) -> None:
        """Check the calls of threads, and log a warning about a long one. Called repeatedly during a wait.

        Raises:
            CommplanError: CP0926 if one of `threads` was in the same call in all checks for `bound_s`.
        """
        now = time.monotonic()
        call, begun = self._oldest(threads, now)
        if call is None:
            return
        if now - begun >= self.bound_s:
            self._fail(call, now - begun)
        if self._reporter.due(now - begun):
            log_warning("%s", self._describe(call, now - begun))

    def oldest(self, threads: Sequence[threading.Thread]) -> RecordedCall | None:
        """The call in which one of `threads` has been for the longest time; None if none is in a call.

        Called repeatedly. The `seconds` of the result are on `time.monotonic`.
        """
        call, begun = self._oldest(threads, time.monotonic())
        if call is None:
            return None
        worker = f" of worker process {call.worker}" if call.worker else ""
        from commplan.recorder.file import Call as RecordedCall  # noqa: PLC0415  loaded by the record

        return RecordedCall(f"{_code(call)}{worker}{_record(call)}", begun, call.stack)

    def _oldest(self, threads: Sequence[threading.Thread], now: float) -> tuple[Call | None, float]:
        """Update `_since`. Returns the oldest call and when it was first seen; (None, now) without calls."""
        frames = _frames(threads)
        calls: dict[int, tuple[Call, float]] = {}
        for thread in threads:
            number = thread.ident or 0
            call = self._call(frames.get(number))
            if call is None:
                continue
            before = self._since.get(number)
            is_same = before is not None and before[0][:3] == call[:3]  # the stack may differ
            calls[number] = call, before[1] if before is not None and is_same else now
        self._since = calls
        return min(calls.values(), key=lambda entry: entry[1], default=(None, now))

    def fail(self, threads: Sequence[threading.Thread], waited: float) -> NoReturn:
        """Raise CP0926 for the first of `threads` that is in a call, or if none is.

        Args:
            threads: the threads that make batches.
            waited: seconds for which peers have waited for this process's part of a batch.
        """
        frames = _frames(threads)
        calls = (self._call(frames.get(thread.ident or 0)) for thread in threads)
        call = next((call for call in calls if call is not None), None)
        if call is None:
            self.fail_without_call(waited)
        self._fail(call, waited)

    @staticmethod
    def fail_without_call(waited: float) -> NoReturn:
        """Raise CP0926 for a delay of `waited` seconds during which no thread is in a call."""
        text = f"this process has not made its part of a batch for {waited:.1f} s"
        raise CommplanError(Diagnostic("CP0926", text, None, (Note("none of its threads is in a call"),)))

    def _call(self, frame: FrameType | None) -> Call | None:
        """The call of the thread with this innermost frame, in this process or in its worker process."""
        return call_in(frame) or self.in_worker(frame)

    def _fail(self, call: Call, waited: float) -> NoReturn:
        """Raise CP0926 for a call that has not returned for `waited` seconds."""
        notes = [Note(f"its Python: {call.stack}")] if call.stack else []
        if call.worker and _state(call) == "alive":
            self.ask_worker(call.worker)
            notes.append(Note("its Python stack is printed above"))
        notes.append(Note("run.batches(timeout=SECONDS) waits longer"))
        raise CommplanError(
            Diagnostic("CP0926", self._describe(call, waited), call.op.span, tuple(notes), file=self.file)
        )

    @staticmethod
    def _describe(call: Call, waited: float) -> str:
        text = f"{_code(call)} has not returned for {waited:.1f} s{_record(call)}"
        state = _state(call) if call.worker else "alive"
        if state != "alive":
            return f"{text}: worker process {call.worker} is {state}"
        return f"{text}, in worker process {call.worker}" if call.worker else text


def _state(call: Call) -> str:
    """The state of the worker process of a call."""
    from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded if a call is overdue

    return process_state(call.worker)


def _code(call: Call) -> str:
    return f"source `{call.op.source}`" if isinstance(call.op, Read) else f"host function `{call.op.fn}`"


def _record(call: Call) -> str:
    return f", on record {call.record}" if call.record >= 0 else ""


def _frames(threads: Sequence[threading.Thread]) -> dict[int, FrameType]:
    """The innermost frame of each of `threads` except the current thread, by thread number.

    A frame of the current thread would refer to itself. It and the memory of its batches would be freed late.
    """
    numbers = {thread.ident for thread in threads} - {threading.get_ident()}
    current_frames = sys._current_frames  # pyright: ignore[reportPrivateUsage]
    return {number: frame for number, frame in current_frames().items() if number in numbers}
