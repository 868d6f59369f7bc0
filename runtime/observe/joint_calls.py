"""Counts the calls of steps with collectives, and detects a step that one process compares and another runs.

All processes compare a step before it runs for a new shape. If only one process calls it for a new shape, it
waits for the others in the comparison, and they wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Mapping
from typing import Any, Protocol

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic
from commplan.lowering.jax import _compat
from commplan.recorder import live
from commplan.recorder.file import Call, Recording
from commplan.recorder.rank_state import Comparison
from commplan.recorder.stacks import user_line
from commplan.tracebacks import shorten

_LONGEST = 600  # characters of a part of a comparison in the record
SETTLE_S = 1.0  # before the others are queried about a comparison, and between two queries


class JointReport(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a process in its joint calls.

    Attributes:
        number: The number of the last joint call that it has begun.
        name: The name of the step.
        is_ahead: Whether this call is still traced, compiled or compared.
        waits: Whether the call has not ended.
        place: The line of the program that makes it.
    """

    number: int
    name: str
    is_ahead: bool
    waits: bool
    place: str


class JointStep(Protocol):
    """Compares a step between processes, see `preflight.Preflight`."""

    communicates: bool

    @property
    def comparison(self) -> Comparison: ...

    def disagreement(self, other: int, report: JointReport) -> Diagnostic: ...


class JointCalls:
    """The joint calls of this process, for all steps that the same processes call together."""

    def __init__(self) -> None:
        self.number, self.name = 0, ""
        self.is_inside = False
        self.comparison: JointStep | None = None
        self._next = 0  # the number of the call that is compared, whether it is counted yet or not
        self._waits_since: float | None = None
        self._written_s = 0.0  # the wait whose comparison was written to the record
        self._suspected: dict[int, int] = {}  # by process, the call that it may run already

    def counted(self, function: Any, comparison: JointStep) -> Any:
        """Wrap a jitted step so that its calls are counted once `comparison` has found collectives in it."""
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

    def begin(self, name: str) -> None:
        self.name, self.is_inside = name, True
        self.number += 1

    @contextlib.contextmanager
    def ahead(self, comparison: JointStep) -> Generator[None]:
        """Mark the preparation of a call, before it runs. If this fails, the call does not count."""
        before = self.number - self.is_inside
        self.comparison, self._next = comparison, before + 1
        try:
            yield
        except BaseException:
            self.number = before
            raise
        finally:
            self.comparison = None

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Mark this process as waiting for others to compare, while the block runs."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None
            self._suspected.clear()

    def waited(self) -> float:
        """Seconds for which a comparison has waited; 0 without one."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def put(self, recording: Recording) -> None:
        """Write the progress to a record, for the sidecar."""
        comparison, since, waits = self.comparison, self._waits_since, self._written_s
        if comparison is not None and since is not None and since != waits:
            self._written_s = since
            recording.put_call(Call(json.dumps([text[:_LONGEST] for text in comparison.comparison]), since))
        number = self.number if comparison is None else self._next
        live.put_comparison(recording, number, since, is_ahead=comparison is not None)

    def report(self, *, waits: bool) -> JointReport:
        return JointReport(self.number, self.name, self.comparison is not None, waits, user_line())

    def disagreement(self, reports: Mapping[int, JointReport]) -> Diagnostic | None:
        """The error if another process runs the call that this one compares; else None.

        Two consecutive reports must agree: the first may precede the comparison of that process.

        Args:
            reports: the new reports, by process.
        """
        comparison, number = self.comparison, self._next
        if comparison is None or self.waited() < SETTLE_S:
            return None
        for other, report in sorted(reports.items()):
            runs = report.number >= number and not report.is_ahead and report.waits
            if runs and self._suspected.get(other) == number:
                return comparison.disagreement(other, report)
            self._suspected[other] = number if runs else -1
        return None

    def look(self, waited: float) -> None:
        """Called repeatedly while a comparison waits. Raises CP0854 if another process runs the step."""
