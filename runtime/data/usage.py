"""What the input work costs, per line of the plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from commplan.diagnostics import Span


class LineUsage(msgspec.Struct, frozen=True):
    """The work of one stage so far, in this process.

    what: `load images`, `map decode`, `share pixels via all_shared`. cpu_s: user and system CPU seconds
    of the threads that worked on it. records: records read, mapped or received, once per copy made.
    nbytes: bytes of the results. wait_s: wall seconds spent waiting on other processes for it.
    """

    what: str
    span: Span
    cpu_s: float
    records: int
    nbytes: int
    wait_s: float
    skipped: int = 0


class Summary(msgspec.Struct, frozen=True):
    """One phase's input work in this process.

    batches: handed out. wait_s: wall seconds in which the caller waited for a batch. ready_mean: batches
    that lay ready when the caller asked, on average. cpu_s: CPU seconds of all lines together.
    """

    phase: str
    lines: tuple[LineUsage, ...]
    batches: int
    wait_s: float
    ready_mean: float

    @property
    def cpu_s(self) -> float:
        return sum(line.cpu_s for line in self.lines)


@dataclass
class _Line:
    what: str
    span: Span
    cpu_s: float = 0.0
    records: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    skipped: int = 0


@dataclass
class Meter:
    """Adds up what the worker threads report; one lock, taken once per block of records."""

    phase: str
    _lines: dict[str, _Line] = field(default_factory=dict[str, _Line])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _batches: int = 0
    _wait_s: float = 0.0
    _ready: int = 0

    def line(self, key: str, what: str, span: Span) -> None:
        """Name the line that later reports call `key`."""
        self._lines[key] = _Line(what, span)

    def add(
        self,
        key: str,
        *,
        cpu_s: float = 0.0,
        records: int = 0,
        nbytes: int = 0,
        wait_s: float = 0.0,
        skipped: int = 0,
    ) -> None:
        with self._lock:
            line = self._lines[key]
            line.cpu_s += cpu_s
            line.records += records
            line.nbytes += nbytes
            line.wait_s += wait_s
            line.skipped += skipped

    @contextmanager
    def waiting(self, key: str, *, idle: bool = False) -> Generator[None]:
        """Count the CPU seconds of the body on line `key`, and its wall seconds as waiting, unless it is
        idle for being ahead."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            waited = 0.0 if idle else time.perf_counter() - wall
            self.add(key, wait_s=waited, cpu_s=time.thread_time() - cpu)

    def handed_out(self, ready: int, wait_s: float) -> None:
        with self._lock:
            self._batches += 1
            self._ready += ready
            self._wait_s += wait_s

    def summary(self) -> Summary:
        with self._lock:
            lines = tuple(
                LineUsage(x.what, x.span, x.cpu_s, x.records, x.nbytes, x.wait_s, x.skipped)
                for x in self._lines.values()
            )
            mean = self._ready / self._batches if self._batches else 0.0
            return Summary(self.phase, lines, self._batches, self._wait_s, mean)
