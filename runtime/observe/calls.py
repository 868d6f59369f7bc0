"""Count and record the steps that a process runs together with others, and detect their ends.

A call of a compiled step returns before its devices are done. Its result is kept until the next call, to
query whether it is ready. A thread soon replaces the result by a few of its smallest arrays.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core

from commplan.diagnostics import CommplanError
from commplan.lowering.jax import _compat
from commplan.recorder import live
from commplan.recorder.file import (
    BEGIN,
    CAPACITY,
    END,
    EVENT,
    EVENTS,
    FAILURES,
    HEAD,
    MOST_NAMES,
    SIZE,
    VERDICT,
    Recording,
    put_name,
)
from commplan.recorder.verdict import usual_s
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.tracebacks import shorten

_KEPT = 4  # The number of arrays to keep of a result: the smallest ones.
_SOURCES = 3  # The most program lines in the name of a step.
_INTERVALS = 16  # The most intervals between runs for their median.
# The number of events written so far, at the offset `HEAD` of the record.
_HEAD = struct.Struct("<q")
# Two events of six numbers, see `recorder.file.EVENT`. Events are written in pairs: the end of a call and the
# begin of the next one, or an event and an empty one.
_PAIR = struct.Struct("<12q")
# The number of pairs in the ring of a record.
_PAIRS = CAPACITY // 2
# An empty event: its kind, name, number and runs.
_NOTHING = (0, 0, 0, 0)


class ResultArrays(list[Any]):
    """A few arrays of the result of a call, kept instead of the whole result."""


class Call(NamedTuple):
    """The begin of a call.

    Attributes:
        nanoseconds: When it began, on `time.monotonic_ns`.
        name: The index of the step's name.
        number: The number of the call among all calls, from 1.
        runs: The number of calls of this step so far, this one included.
    """

    nanoseconds: int
    name: int
    number: int
    runs: int


class Calls:
    """The calls that all of `processes` make in the same order.

    The main thread makes calls while another thread calls `observe`. A lock would delay every step. Instead
    `observe` compares the number of the call before and after it reads the state of a call.

    Attributes:
        processes: The numbers of the processes.
        key: The processes, as text.
        recording: The record that the calls are written to; None if there is none.
        memory: The memory of the record, or as much memory of this process without a record.
        names: The names of steps, by index.
        places: By the same index, the lines of the step's collectives, such as "line 3 of a.plan, in " or "".
        moved: When `observe` last found that a call had begun or ended, in seconds on `time.monotonic`.
        waits: The number of the call that had not ended at the last `observe`; 0 if all had.
        number: The number of calls so far.
        joint: The calls that issue collectives.
    """

    def __init__(self, processes: Sequence[int], recording: Recording | None) -> None:
        self.processes, self.key = tuple(processes), ",".join(map(str, processes))
        self.recording = recording
        self.memory = bytearray(SIZE) if recording is None else recording.memory
        self.names: list[str] = []
        self.places: list[str] = []
        self.moved, self.waits, self.number = time.monotonic(), 0, 0
        self._pairs = itertools.count()  # The next pair of events.
        self._inside = False  # Whether the last call has not returned.
        self._open = _NOTHING  # The end of the last call, until it is written.
        self._head = 0  # The number of events after the begin of the last call was written.
        self.joint = JointCalls(recording, is_put=True)
        self._result: Any = None  # The result of the last call, or `ResultArrays` of it; None if it has none.
        self._last_state = (0, False, True)  # At the last `observe`: number, is inside, has ended.

    def counted(self, function: Callable[..., Any], name: str) -> tuple[Callable[..., Any], int]:
        """Wrap a compiled step to count and record its calls.

        A call within a trace belongs to another step and is not counted.

        Args:
            function: The step, a function under `jax.jit`.
            name: The name of the step.

        Returns:
            The wrapped step, and the index of its name. After `MOST_NAMES` steps, steps share the last index.
        """
        index = min(len(self.names), MOST_NAMES - 1)
        self.names[index:], self.places[index:] = [name], [""]
        put_name(self.memory, index, f"`{name}`")
        memory, pairs, runs = self.memory, self._pairs, itertools.count(1)
        # Local names save time: a call costs about a microsecond more than one of `function`.
        untraced, now, pack, pack_head = _compat.untraced, time.monotonic_ns, _PAIR.pack_into, _HEAD.pack_into

        def call(*args: Any, **kwargs: Any) -> Any:
            if not untraced():
                return function(*args, **kwargs)
            at, before, run = now(), self._open, next(runs)
            # A thread that sees the new number sees that a call is under way.
            self._inside, self._result = True, None
            self.number = number = self.number + 1
            self._open = (END, index, number, run)
            pair = next(pairs)
            offset = EVENTS + pair % _PAIRS * _PAIR.size
            pack(memory, offset, at, *before, 0, at, BEGIN, index, number, run, 0)
            self._head = head = 2 * pair + 2
            pack_head(memory, HEAD, head)
            try:
                self._result = result = function(*args, **kwargs)
                return result
            except CommplanError as error:
                shorten(error)
                raise
            finally:
                self._inside = False

        for attribute in ("lower", "trace", "eval_shape", "clear_cache"):
            setattr(call, attribute, getattr(function, attribute))
        call.__name__, call.__doc__, call.__wrapped__ = name, function.__doc__, function  # pyright: ignore[reportFunctionMemberAccess]
        return call, index

    def locate(self, index: int, lines: Sequence[int], file: str, sources: Sequence[str] = ()) -> None:
        """Set the lines that request the collectives of a step; those of the plan, else of the program.

        Args:
            index: The index of the step's name.
            lines: Lines of the plan, in any order.
            file: The plan's file, or "".
            sources: Lines of the program, such as `train.py:41`.
        """
        if sources:
            more = f" and {len(sources) - _SOURCES} more" if len(sources) > _SOURCES else ""
            self.places[index] = f"{', '.join(sources[:_SOURCES])}{more}, in "
        if lines:
            numbers = ", ".join(map(str, sorted(set(lines))))
            one_of = "line" if len(set(lines)) == 1 else "one of lines"
            self.places[index] = f"{one_of} {numbers} of {file or 'the plan'}, in "
        put_name(self.memory, index, self.where(index))

    def where(self, index: int) -> str:
        """The lines and the name of a step, such as "line 3 of a.plan, in `step`"."""
        return f"{self.places[index]}`{self.names[index]}`"

    def current(self) -> str:
        """The step of the last call, with its lines; "" before the first call."""
        return "".join(self.where(call.name) for call in self._last())

    def began(self) -> float:
        """When the last call began, in seconds on `time.monotonic`; 0 before the first one."""
        return sum(call.nanoseconds for call in self._last()) * 1e-9

    def observe(self) -> None:
        """Update the state of the last call, also in the record. Only one thread at a time may call this."""
        self._update()
        if _HEAD.unpack_from(self.memory, HEAD)[0] < self._head:  # `_write` was interrupted by a call
            _HEAD.pack_into(self.memory, HEAD, self._head)
        if self.recording is not None:
            waits_ns = sum(call.nanoseconds for call in self._last()) if self.waits else 0
            live.put_step(self.recording, self.moved, waits_ns)
            self.joint.put()

    def _update(self) -> None:
        """Detect whether the last call has ended. Changes nothing if another call has begun since."""
        number, inside, result = self.number, self._inside, self._result
        if result is not None and not isinstance(result, ResultArrays):
            arrays = _smallest(result)
            if self._result is result:
                self._result = arrays
            result = arrays
        ended = not inside and (result is None or _ready(result))
        if number != self.number:
            return
        if (number, inside, ended) != self._last_state:
            self._last_state, self.moved = (number, inside, ended), time.monotonic()
        self.waits = 0 if ended else number
        last = self._open
        if ended and last[2] == number and last is not _NOTHING:
            self._open = _NOTHING
            self._write(last)

    def _write(self, event: tuple[int, int, int, int]) -> None:
        """Write an event and an empty one, now: its kind, name, number and runs."""
        pair, at = next(self._pairs), time.monotonic_ns()
        _PAIR.pack_into(self.memory, EVENTS + pair % _PAIRS * _PAIR.size, at, *event, 0, at, *_NOTHING, 0)
        _HEAD.pack_into(self.memory, HEAD, 2 * pair + 2)

    def judged(self, text: str) -> None:
        """Record the verdict of the watchdog, and mark the record as one of a failure, which is kept."""
        index = min(len(self.names), MOST_NAMES - 1)
        put_name(self.memory, index, text)
        self._write((VERDICT, index, 0, 0))
        _HEAD.pack_into(self.memory, FAILURES, 1)

    def _last(self) -> list[Call]:
        """A list of the last call, or an empty one before the first call."""
        return list(itertools.islice(self._backwards(), 1))

    def _backwards(self) -> Iterator[Call]:
        """The calls in the ring of the record, the newest first."""
        (head,) = _HEAD.unpack_from(self.memory, HEAD)
        for slot in range(head - 1, max(head - CAPACITY, 0) - 1, -1):
            event = EVENT.unpack_from(self.memory, EVENTS + slot % CAPACITY * EVENT.size)
            if event[1] == BEGIN:
                yield Call(event[0], *event[2:5])

    def _intervals(self) -> tuple[int, list[float]]:
        """The number of runs of the last step, and the seconds between runs, the newest first."""
        last = self._last()
        if not last:
            return 0, []
        begun = [call.nanoseconds for call in self._backwards() if call.name == last[0].name]
        pairs = itertools.pairwise(begun[: _INTERVALS + 1])
        return last[0].runs, [(after - before) * 1e-9 for after, before in pairs]

    def median_s(self) -> float:
        """The median of the seconds between the begins of two runs of the last step; 0 before two runs."""
        intervals = self._intervals()[1]
        return statistics.median(intervals) if intervals else 0.0

    def usual_s(self, bound_s: float) -> float:
        """Seconds after which a call of the last step counts as slow; see `recorder.verdict.usual_s`."""
        return usual_s(*self._intervals(), bound_s)


def _smallest(result: Any) -> ResultArrays:
    """The smallest arrays of a result, a pytree; several, because some of them may be donated later."""
    leaves = jax.tree_util.tree_leaves(result)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    return ResultArrays(sorted(arrays, key=lambda x: x.size)[:_KEPT])


def _ready(arrays: ResultArrays) -> bool:
    """Whether the devices have finished the call with these results.

    All results of a call become ready together, so the first one that is not donated answers for all. True if
    all of them are donated.
    """
    for array in arrays:
        try:
            if not array.is_deleted():
                return bool(array.is_ready())
        except RuntimeError:
            continue
    return True
