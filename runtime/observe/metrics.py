"""What the input costs, as a file in the text format of Prometheus.

The format: https://prometheus.io/docs/instrumenting/exposition_formats (text, version 0.0.4). A collector of
text files (node_exporter's, for one) picks the file up where it lies: nothing of ours listens on a port.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from commplan.diagnostics import fail
from commplan.io import replacing
from commplan.runtime.input.accounting import LineUsage, Meter, Summary, merged
from commplan.wait import is_seconds

PERIOD_S = 10.0
_PREFIX = "commplan_input_"


class Measured(Protocol):
    """Batches that know what they cost."""

    def summary(self) -> Summary: ...


@dataclass
class _Entry:
    meter: Meter
    users: list[weakref.ref[Measured]]


@dataclass
class Ledger:
    """The input work of a run: of the batches that are, and of those that were.

    Batches are held weakly: what they cost stays when they are gone.
    """

    _entries: dict[int, _Entry] = field(default_factory=dict[int, _Entry])  # by the meter's identity
    _past: dict[str, Summary] = field(default_factory=dict[str, Summary])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, batches: Measured, meters: Iterable[Meter]) -> None:
        """Count `batches`, whose work `meters` add up; members by clocks of their own share some of them."""
        with self._lock:
            for meter in meters:
                self._entries.setdefault(id(meter), _Entry(meter, [])).users.append(weakref.ref(batches))

    def summaries(self) -> list[Summary]:
        """One summary for each phase that had batches, in the order in which they were first asked for."""
        with self._lock:
            ended: list[Summary] = []
            summaries = dict(self._past)
            for key, entry in list(self._entries.items()):
                live = [source.summary().queue for user in entry.users if (source := user()) is not None]
                queue = min(live, key=lambda queue: queue.ready, default=None)
                summary = entry.meter.summary(queue)
                _count(summaries, summary)
                if not live:
                    ended.append(summary)
                    del self._entries[key]
            for summary in ended:
                _count(self._past, summary)
            return list(summaries.values())


def _count(summaries: dict[str, Summary], summary: Summary) -> None:
    before = summaries.get(summary.phase)
    summaries[summary.phase] = summary if before is None else merged((before, summary))


class Metrics:
    """A file that is written again every `period_s` seconds, and once more by `close`.

    Made by `run.metrics(path)`. `path`: where this process writes. Each file is complete at any time: it is
    written beside its place and then moved there. A background write that fails (a full disk) is tried again
    a period later; `write` and `close` raise CP0960.
    """

    def __init__(self, path: Path, summaries: Callable[[], Sequence[Summary]], period_s: float) -> None:
        self.path, self.period_s = path, period_s
        self._summaries = summaries
        self._end = threading.Event()
        self._writing = threading.Lock()
        self.write()
        self._thread = threading.Thread(target=self._keep_writing, name="commplan-metrics", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write the file now. Raises CP0960."""
        with self._writing:
            write(self.path, text(self._summaries()))

    def close(self) -> None:
        """Write the file a last time and stop. Closing twice is fine. Raises CP0960."""
        if self._end.is_set():
            return
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.write()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_writing(self) -> None:
        while not self._end.wait(self.period_s):
            with contextlib.suppress(Exception):  # the caller hears of it from `close`, if it lasts
                self.write()


def close_quietly(metrics: Metrics) -> None:
    """What a finaliser calls: a last write as far as it goes."""
    with contextlib.suppress(Exception):
        metrics.close()


def checked_period(period_s: float) -> float:
    """Raises CP0961 for a period that is no positive number of seconds."""
    if not is_seconds(period_s):
        fail("CP0961", f"metrics are written every {period_s!r} seconds: a number above 0 was expected")
    return float(period_s)


def place(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Where process `rank` of `ranks` writes: `{rank}` in the path is its number; where there are several
    and the path does not say, `costs.prom` becomes `costs.rank3.prom`."""
    wanted = os.fspath(path)
    if "{rank}" in wanted:
        return Path(wanted.replace("{rank}", str(rank)))
    target = Path(wanted)
    return target.with_name(f"{target.stem}.rank{rank}{target.suffix}") if ranks > 1 else target


def write(path: Path, content: str) -> None:
    """Put a file in its place, whole. Raises CP0960."""
    try:
        with replacing(path) as new:
            new.write_text(content, encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(
            "CP0960",
            f"metrics cannot be written to {path}: {getattr(error, 'strerror', None) or error}",
            "expected: a file in a folder that exists and may be written to",
        )


def text(summaries: Iterable[Summary]) -> str:
    """The file's contents: one family of samples after another, all phases and ranks in each."""
    known = list(summaries)
    lines: list[str] = []
    for name, help_, samples in _FAMILIES:
        rows = [f"{_PREFIX}{name}{_labels(labels)} {value!r}" for s in known for labels, value in samples(s)]
        if rows:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {_PREFIX}{name} {help_}", f"# TYPE {_PREFIX}{name} {kind}", *rows]
    return "".join(f"{line}\n" for line in lines)


Labels = dict[str, str]
Samples = Iterator[tuple[Labels, float]]


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _phase(summary: Summary, **more: str) -> Labels:
    return {"plan": summary.plan, "phase": summary.phase, **more, "rank": str(summary.rank)}


def _line(summary: Summary, line: LineUsage) -> Labels:
    return _phase(summary, line=str(line.span.line), stage=line.what)


def _per_line(attribute: str) -> Callable[[Summary], Samples]:
    def samples(summary: Summary) -> Samples:
        for line in summary.lines:
            yield _line(summary, line), getattr(line, attribute)

    return samples


def _per_phase(attribute: str) -> Callable[[Summary], Samples]:
    def samples(summary: Summary) -> Samples:
        yield _phase(summary), attrgetter(attribute)(summary)

    return samples


def _cpu(summary: Summary) -> Samples:
    for line in summary.lines:
        labels = _line(summary, line)
        yield {**labels, "mode": "user"}, line.user_s
        yield {**labels, "mode": "system"}, line.system_s


def _slow(attribute: str) -> Callable[[Summary], Samples]:
    def samples(summary: Summary) -> Samples:
        if summary.slow is not None:
            yield {**_phase(summary), "member": str(summary.slow.member)}, getattr(summary.slow, attribute)

    return samples


# Families by where their samples are found: name, attribute, help.
_OF_LINES = (
    ("records_total", "records", "Records that a plan line read, mapped or received, once per copy made."),
    ("bytes_total", "nbytes", "Bytes of a plan line's results."),
    ("wait_seconds_total", "wait_s", "Time in which a plan line waited for other processes."),
    ("skipped_records_total", "skipped", "Records left out because they failed and the plan skips."),
)
_OF_PHASES = (
    ("batches_total", "batches", "Batches handed out."),
    ("batch_wait_seconds_total", "wait_s", "Time in which the training waited for a batch."),
    ("checked_records_total", "checked", "Records whose ids were compared with the contract of their visit."),
    ("worker_restarts_total", "restarts", "Worker processes that died and were replaced."),
    ("ready_batches", "queue.ready", "Batches that lie ready now."),
    ("ready_batches_mean", "ready_mean", "Batches that lay ready when one was asked for, on average."),
    ("ready_batches_least", "queue.least", "Batches that lay ready when one was asked for, at least."),
    ("depth_batches", "queue.depth", "Batches made ahead at most."),
    ("slots", "queue.slots", "Slots of the memory that processes share."),
    ("slots_used", "queue.used", "Slots that hold a batch now."),
)
_OF_SLOW_MEMBERS = (
    ("slow_member_behind_records", "behind", "Records that the slowest member is behind the fastest one."),
    ("slow_member_wait_seconds_total", "wait_s", "Time in which members waited for the slowest one."),
)
_FAMILIES: tuple[tuple[str, str, Callable[[Summary], Samples]], ...] = (
    ("cpu_seconds_total", "CPU time of a plan line's input work.", _cpu),
    *((name, help_, _per_line(attribute)) for name, attribute, help_ in _OF_LINES),
    *((name, help_, _per_phase(attribute)) for name, attribute, help_ in _OF_PHASES),
    *((name, help_, _slow(attribute)) for name, attribute, help_ in _OF_SLOW_MEMBERS),
)
