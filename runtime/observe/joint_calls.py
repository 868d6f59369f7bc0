"""Count the calls of steps with collectives, and write their progress to a record for the sidecar.

All processes compare a step before it runs for a new shape. If only one process calls it for a new shape, it
waits for the others in the comparison, and they wait for it in a collective: `recorder.verdict` decides this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any, Protocol

from commplan.diagnostics import CommplanError, fail
from commplan.lowering.jax import _compat
from commplan.recorder import live
from commplan.recorder.file import Call, Recording
from commplan.recorder.rank_state import Comparison
from commplan.recorder.stacks import user_line
from commplan.runtime.observe.abort_hook import mark_common
from commplan.sidecar import is_attended
from commplan.tracebacks import shorten


class JointStep(Protocol):
    """A step that is compared between processes; see `preflight.Preflight`.

    Attributes:
        communicates: Whether a comparison has found collectives in the step.
    """

    communicates: bool

    @property
    def comparison(self) -> Comparison:
        """The description of the step, for messages of other processes."""
        ...


class JointCalls:
    """The joint calls of this process, for all steps that the same processes call together.

    Args:
        recording: The record of this process; None if there is none.
        group: A bit mask of the axes along which the ranks differ that make the calls: bit 0 for the first
            axis of the record.
        is_put: Whether a thread writes the progress by calls of `put`. Then only the begin and the end of
            comparisons are written at once, since a C call that keeps the interpreter's lock may follow.

    Attributes:
        number: The number of joint calls so far, one that is being prepared included if it is counted.
        name: The name of the step that was called last, or "".
        is_inside: Whether that call has not returned.
        comparison: The step that is compared now, or None.
    """

    def __init__(self, recording: Recording | None = None, group: int = 0, *, is_put: bool = False) -> None:
        self.number, self.name = 0, ""
        self.is_inside = False
        self.comparison: JointStep | None = None
        self._recording, self._group, self._is_put = recording, group, is_put
        self._next = 0  # The number of the call that is compared, whether it is counted yet or not.
        self._exchanges = 0  # The number of times that this process has waited for others to compare.
        self._waits_since: float | None = None  # On `time.monotonic`; None if it does not wait.

    def counted(self, function: Any, comparison: JointStep) -> Any:
        """Wrap a jitted step so that its calls are counted once `comparison` has found collectives in it.

        Calls within a trace are not counted, as they belong to another step.
        """
        name, untraced = function.__name__, _compat.untraced

        def call(*args: Any, **kwargs: Any) -> Any:
            if not untraced():
                return function(*args, **kwargs)
            if comparison.communicates:
                self.begin(name)
            try:
                return function(*args, **kwargs)
            except CommplanError as error:
                shorten(error)
                raise
            finally:
                self.is_inside = False

        for attribute in ("lower", "trace", "eval_shape", "clear_cache"):
            setattr(call, attribute, getattr(function, attribute))
        call.__name__, call.__doc__, call.__wrapped__ = name, function.__doc__, function  # pyright: ignore[reportFunctionMemberAccess]
        return call

    @property
    def is_watched(self) -> bool:
        """Whether a sidecar reports the ranks for which the others wait."""
        return self._recording is not None and is_attended()

    def begin(self, name: str) -> None:
        """Count a call of the step `name`."""
        self.name, self.is_inside = name, True
        self.number += 1
        if not self._is_put:
            self.put()

    @contextlib.contextmanager
    def ahead(self, comparison: JointStep) -> Generator[None]:
        """Mark the preparation of a call, before it runs. If this fails, the call does not count."""
        before = self.number - self.is_inside  # The calls before this one, which may be counted already.
        self.comparison, self._next = comparison, before + 1
        self.put()
        try:
            yield
        except BaseException:
            self.number = before
            raise
        finally:
            self.comparison = None
            self.put()

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Mark this process as waiting for others to compare, while the block runs."""
        self._waits_since = time.monotonic()
        self._exchanges += 1
        self.put()
        try:
            yield
        finally:
            self._waits_since = None
            self.put()

    def put(self) -> None:
        """Write the progress to the record. Repeat this if another thread changes the progress meanwhile."""
        progress = None
        while self._recording is not None and progress != (self.comparison, self._waits_since):
            progress = self.comparison, self._waits_since
            self._put(self._recording, *progress)

    def _put(self, recording: Recording, comparison: JointStep | None, since: float | None) -> None:
        """Write the progress to `recording`. The arguments are `comparison` and `_waits_since`."""
        waits_since = None if comparison is None else since
        if recording.progress != (self.name, waits_since):  # Other groups write it, too.
            mine = Comparison("", self.name)
            if comparison is not None and waits_since is not None:
                mine = comparison.comparison
            recording.put_call(Call(mine.text(), waits_since or 0.0))
            recording.progress = self.name, waits_since
        number = live.position(self.number)
        if comparison is not None:
            number = live.position(self._next, self._exchanges)
        live.put_comparison(recording, number, since, self._group, is_ahead=comparison is not None)

    def look(self) -> None:
        """Raise the verdict of the sidecar, if there is one. Called repeatedly while a comparison waits.

        Raises:
            CommplanError: the code of the verdict: CP0834 if another rank cannot continue, CP0854 if another
                rank runs the step.
        """
        if self._recording is None or self._is_put:  # With `is_put`, the watchdog reads the verdict.
            return
        verdict = live.verdict_of(self._recording)
        if verdict is None:
            return
        if verdict.code == live.BLOCKED:
            waits = f"the comparison of a step, called at {user_line() or 'an unknown line'}, waits for it"
            fail(verdict.code, verdict.message, *verdict.notes, waits)
        error = CommplanError(verdict.diagnostic)
        mark_common(error, is_common=False)
        raise error
