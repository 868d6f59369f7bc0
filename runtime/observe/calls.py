"""Counts and records the steps that a process runs together with others, and detects their ends.

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

_KEPT = 4  # number of arrays to keep of a result: the smallest ones
_SOURCES = 3  # maximum number of program lines in the name of a step
_INTERVALS = 16  # number of intervals between runs for their median
_HEAD = struct.Struct("<q")
# Events are written in pairs: the end of a call and the begin of the next one, or an event and an empty one.
_PAIR, _PAIRS = struct.Struct("<12q"), CAPACITY // 2
_NOTHING = (0, 0, 0, 0)  # kind, name, number, runs


class ResultArrays(list[Any]):
    """A few arrays of the result of a call, kept instead of the whole result."""


class Call(NamedTuple):
    """The begin of a call.

    Attributes:
        nanoseconds: When it began, since boot.
        name: The index of its name.
        number: Its number among all calls.
        runs: The number of calls with this name so far.
    """

    nanoseconds: int
    name: int
    number: int
    runs: int


class Calls:
    """The calls that all of `processes` make in the same order.

    Attributes:
        key: The processes, as text.
        names: The names of steps.
        places: For each name, the lines of its collectives in the plan.
        moved: When a call last began or ended, on `time.monotonic`.
        waits: The number of the call that has not ended; 0 if all have.
        joint: The calls that issue collectives.
    """

    def __init__(self, processes: Sequence[int], recording: Recording | None) -> None:
        self.processes, self.key = tuple(processes), ",".join(map(str, processes))
        self.recording = recording
        self.memory = bytearray(SIZE) if recording is None else recording.memory
        self.names: list[str] = []
        self.places: list[str] = []
        self.moved, self.waits, self.number = time.monotonic(), 0, 0
        self._pairs = itertools.count()
        self._inside, self._open, self._head = False, _NOTHING, 0
        self.joint = JointCalls(recording, is_put=True)
        self._result: Any = None
        self._last_state = (0, False, True)

    def counted(self, function: Callable[..., Any], name: str) -> tuple[Callable[..., Any], int]:
        """Wrap `function`, a compiled step, to count its calls. Also returns the index of its name.

        A call within a trace belongs to another step. The overhead is about a microsecond.
        """
        index = min(len(self.names), MOST_NAMES - 1)
        self.names[index:], self.places[index:] = [name], [""]
        put_name(self.memory, index, f"`{name}`")
        memory, pairs, runs = self.memory, self._pairs, itertools.count(1)
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
            place = EVENTS + pair % _PAIRS * _PAIR.size
            pack(memory, place, at, *before, 0, at, BEGIN, index, number, run, 0)
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
        """Set the positions of the collectives of step `index`.

        Args:
            index: the index of the step's name.
            lines: lines of the plan.
            file: the name of the plan.
            sources: lines of the program, such as `train.py:41`.
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
        """The lines of the plan and the name of the step."""
        return f"{self.places[index]}`{self.names[index]}`"

    def current(self) -> str:
        """The step of the last call, with its lines."""
        return "".join(self.where(call.name) for call in self._last())

    def began(self) -> float:
        """When the last call began, on `time.monotonic`; 0 before the first one."""
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
        pair, at = next(self._pairs), time.monotonic_ns()
        _PAIR.pack_into(self.memory, EVENTS + pair % _PAIRS * _PAIR.size, at, *event, 0, at, *_NOTHING, 0)
        _HEAD.pack_into(self.memory, HEAD, 2 * pair + 2)

    def judged(self, text: str) -> None:
        """Record the verdict of the watchdog; the record is kept."""
        index = min(len(self.names), MOST_NAMES - 1)
        put_name(self.memory, index, text)
        self._write((VERDICT, index, 0, 0))
        _HEAD.pack_into(self.memory, FAILURES, 1)

    def _last(self) -> list[Call]:
        """The last call, if there is one."""
        return list(itertools.islice(self._backwards(), 1))

    def _backwards(self) -> Iterator[Call]:
        (head,) = _HEAD.unpack_from(self.memory, HEAD)
        for slot in range(head - 1, max(head - CAPACITY, 0) - 1, -1):
            event = EVENT.unpack_from(self.memory, EVENTS + slot % CAPACITY * EVENT.size)
            if event[1] == BEGIN:
                yield Call(event[0], *event[2:5])

    def _intervals(self) -> tuple[int, list[float]]:
        """How often the last step has run, and the seconds between its runs, the newest first."""
        last = self._last()
        if not last:
            return 0, []
        begun = [call.nanoseconds for call in self._backwards() if call.name == last[0].name]
        pairs = itertools.pairwise(begun[: _INTERVALS + 1])
        return last[0].runs, [(after - before) * 1e-9 for after, before in pairs]

    def median_s(self) -> float:
        """The median interval between two runs of the last step; 0 before there is one."""
        intervals = self._intervals()[1]
        return statistics.median(intervals) if intervals else 0.0

    def usual_s(self, bound_s: float) -> float:
        """See `recorder.verdict.usual_s`."""
        return usual_s(*self._intervals(), bound_s)


def _smallest(result: Any) -> ResultArrays:
    leaves = jax.tree_util.tree_leaves(result)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    return ResultArrays(sorted(arrays, key=lambda x: x.size)[:_KEPT])


def _ready(arrays: ResultArrays) -> bool:
    """Whether the devices have computed these arrays. Donated arrays are skipped."""
    for array in arrays:
        try:
            if not array.is_deleted():
                return bool(array.is_ready())
        except RuntimeError:
            continue
    return True
