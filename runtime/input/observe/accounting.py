"""The cost of the input work, per line of the plan.

Threads report their work to the `Meter` of their phase. Its `summary()` is a `Summary`, which users print and
export as metrics.
"""

from __future__ import annotations

import functools
import itertools
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import Span
from commplan.ir.types import sized


class Cpu(NamedTuple):
    """CPU seconds of a thread.

    Attributes:
        both_s: user and system time together.
        system_s: system time alone.
    """

    both_s: float
    system_s: float

    def __sub__(self, other: Cpu) -> Cpu:
        both_s = self.both_s - other.both_s
        # The two numbers come from different clocks, which may differ by nanoseconds.
        return Cpu(both_s, min(self.system_s - other.system_s, both_s))


def thread_cpu() -> Cpu:
    """The calling thread's CPU seconds so far.

    The sum is exact to the nanosecond. The kernel splits it into user and system time by its ticks, so the
    system time is accurate over many records, but not for a single one.
    """
    both_s = time.thread_time()
    return Cpu(both_s, resource.getrusage(resource.RUSAGE_THREAD).ru_stime)


class LineUsage(msgspec.Struct, frozen=True):
    """The work of one stage so far.

    Attributes:
        what: the stage: `load images`, `map decode`, `share pixels via all_shared`.
        span: the place in the plan.
        cpu_s: user and system CPU seconds of the threads and worker processes that worked on it.
        records: the number of records read, mapped or received, once per copy made.
        nbytes: the bytes of the results.
        wait_s: wall seconds spent waiting on other processes for it.
        skipped: the number of records left out by `on_error = skip`.
        system_s: the system's part of `cpu_s`.
        cached: the number of records copied from the cache of the stage, in addition to `records`.
    """

    what: str
    span: Span
    cpu_s: float = 0.0
    records: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    skipped: int = 0
    system_s: float = 0.0
    cached: int = 0

    @property
    def user_s(self) -> float:
        """User CPU seconds: `cpu_s` without `system_s`."""
        return max(self.cpu_s - self.system_s, 0.0)


# The fields of `LineUsage` that are sums.
_COSTS = tuple(field for field in LineUsage.__struct_fields__ if field not in ("what", "span"))


class Queue(msgspec.Struct, frozen=True):
    """The state of the queue of batches that are made ahead of the caller.

    Attributes:
        ready: the number of batches that are ready now.
        mean: the average number of batches that were ready when the caller took one.
        least: the minimum of this number, without the first batches of epochs, before which no batch is made
            ahead; 0 if no other batch was taken.
        depth: the maximum number of batches made ahead; 0 if there is no queue.
        slots: the number of slots of the memory that processes share; 0 if they share none.
        used: the number of slots that hold a batch now.
    """

    ready: int = 0
    mean: float = 0.0
    least: int = 0
    depth: int = 0
    slots: int = 0
    used: int = 0


class Slow(msgspec.Struct, frozen=True):
    """A member that delays the others.

    Attributes:
        member: the index of the member.
        behind: the number of records that it is behind the fastest member now.
        wait_s: wall seconds for which others waited for it.
    """

    member: int
    behind: int
    wait_s: float


class Summary(msgspec.Struct, frozen=True):
    """One phase's input work in one process, or in several processes together (see `merged`).

    Attributes:
        phase: the name of the phase.
        lines: the work of each stage.
        batches: the number of batches handed out.
        wait_s: wall seconds for which the caller waited for a batch.
        ready_mean: the average number of batches that were ready when the caller took one.
        queue: the batches made ahead.
        checked: the number of records whose ids were compared with the contract of their visit.
        slow: the slowest member; None if members have one clock, or if no member was behind.
        plan: the name of the plan; empty if it has none.
        rank: the rank; the lowest one of several.
        ranks: the number of ranks.
        workers: the threads or processes that do the work, such as `2 threads`; empty if not known.
        restarts: the number of worker processes that died and were replaced.
        cpu_s: CPU seconds of all lines together.
        system_s: the system's part of `cpu_s`.
        skipped: the number of skipped records, over all lines.
    """

    phase: str
    lines: tuple[LineUsage, ...]
    batches: int
    wait_s: float
    ready_mean: float
    queue: Queue = Queue()
    checked: int = 0
    slow: Slow | None = None
    plan: str = ""
    rank: int = 0
    ranks: int = 1
    workers: str = ""
    restarts: int = 0

    @property
    def cpu_s(self) -> float:
        return sum(line.cpu_s for line in self.lines)

    @property
    def system_s(self) -> float:
        return sum(line.system_s for line in self.lines)

    @property
    def skipped(self) -> int:
        return sum(line.skipped for line in self.lines)

    def __str__(self) -> str:
        """A table with one row per plan line; `repr` has every field."""
        of_plan = f" of plan {self.plan}" if self.plan else ""
        where = f"rank {self.rank}" if self.ranks == 1 else f"{self.ranks} ranks"
        batches = f"{self.batches:,} batch{'es' * (self.batches != 1)}"
        head = (
            f"input of phase {self.phase}{of_plan}, {where}: {batches}, waited {self.wait_s:.3f} s for them"
        )
        return "\n".join([head, *_table(self), *remarks([self])])


class Remarked(Protocol):
    """The facts about one process that `remarks` uses, as in `Summary`. A queue may be missing (None)."""

    @property
    def batches(self) -> int: ...
    @property
    def checked(self) -> int: ...
    @property
    def workers(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def queue(self) -> Queue | None: ...
    @property
    def slow(self) -> Slow | None: ...


def _table(summary: Summary) -> list[str]:
    """The plan lines of a phase as columns of text. The last two columns are omitted if they are all 0."""
    head = ["line", "stage", "records", "bytes", "CPU s", "waited s", "skipped", "cached"]
    rows = [head, *map(_row, summary.lines)]
    cached = any(line.cached for line in summary.lines)
    columns = [
        column for column in range(len(head)) if (column != 6 or summary.skipped) and (column != 7 or cached)
    ]
    shown = [[row[column] for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.ljust(width) if column == 1 else cell.rjust(width) for column, (cell, width) in cells)
        for cells in (enumerate(zip(row, widths, strict=True)) for row in shown)
    ]


def _row(line: LineUsage) -> list[str]:
    """A row of `_table`."""
    costs = [f"{line.records:,}", sized(line.nbytes), f"{line.cpu_s:.3f}", f"{line.wait_s:.3f}"]
    return [str(line.span.line), line.what, *costs, f"{line.skipped:,}", f"{line.cached:,}"]


def remarks(summaries: Sequence[Remarked]) -> list[str]:
    """Sentences about a phase's queue, workers, checks and members.

    Args:
        summaries: the facts about each process. The emptiest queue and the slowest member are reported.
    """
    sentences: list[str] = []
    # Members with separate clocks have no queue.
    queues = [queue for each in summaries if each.batches and (queue := each.queue) and queue.depth]
    if queues:
        least = min(queues, key=lambda queue: queue.mean)
        shared = f"; {least.slots} slots of shared memory" if least.slots else ""
        sentences.append(
            f"batches ready at a request: {least.mean:.2f} of {least.depth} on average, "
            f"at least {min(queue.least for queue in queues)}{shared}"
        )
    if workers := ", ".join(dict.fromkeys(summary.workers for summary in summaries if summary.workers)):
        died = sum(summary.restarts for summary in summaries)
        worse = (
            f"; replaced after they ended: {died} worker process{'es' if died > 1 else ''}" if died else ""
        )
        sentences.append(f"worked on by {workers}{worse}")
    if checked := sum(summary.checked for summary in summaries):
        sentences.append(f"{checked:,} record ids checked against the contract")
    waits = (summary.slow for summary in summaries if summary.slow)
    slow = max(waits, key=lambda slow: slow.wait_s, default=None)
    if slow is not None:
        sentences.append(
            f"the slowest member is {slow.member}: {slow.behind} records behind, "
            f"waited for {slow.wait_s:.3f} s"
        )
    return sentences


def merged(summaries: Iterable[Summary]) -> Summary:
    """Merge summaries of one phase, at least one.

    Work is added line by line. Of the queues, the result has the least `ready` and `least`, the average
    `mean`, and the greatest `depth`, `slots` and `used`.
    """
    return functools.reduce(_both, summaries)


def _both(first: Summary, second: Summary) -> Summary:
    """The merged summary of two."""
    lines = {(line.what, line.span): line for line in first.lines}
    for line in second.lines:
        before = lines.get((line.what, line.span))
        lines[line.what, line.span] = line if before is None else added(before, line)
    batches = first.batches + second.batches
    ready_sum = first.ready_mean * first.batches + second.ready_mean * second.batches
    mean = ready_sum / batches if batches else 0.0
    return replace(
        first,
        lines=tuple(lines.values()),
        batches=batches,
        wait_s=first.wait_s + second.wait_s,
        ready_mean=mean,
        queue=_emptier(first, second, mean),
        checked=first.checked + second.checked,
        slow=max((s for s in (first.slow, second.slow) if s), key=lambda slow: slow.wait_s, default=None),
        rank=min(first.rank, second.rank),
        ranks=first.ranks + second.ranks if first.rank != second.rank else max(first.ranks, second.ranks),
        workers=", ".join(dict.fromkeys(workers for workers in (first.workers, second.workers) if workers)),
        restarts=first.restarts + second.restarts,
    )


def added(first: LineUsage, second: LineUsage) -> LineUsage:
    """The sum of the work on one stage, of two processes or two runs."""
    return _more(first, {name: getattr(second, name) for name in _COSTS})


def _more(line: LineUsage, costs: Mapping[str, float]) -> LineUsage:
    """`line` with `costs`, fields of `LineUsage`, added."""
    return replace(line, **{name: getattr(line, name) + cost for name, cost in costs.items()})


def _emptier(first: Summary, second: Summary, mean: float) -> Queue:
    """The merged queue of two summaries, see `merged`. mean: its average."""
    # `least` is meaningless before the first batch, and the other numbers are for a queue of depth 0.
    queues = [summary.queue for summary in (first, second) if summary.batches] or [first.queue]
    live = [summary.queue for summary in (first, second) if summary.queue.depth] or queues
    return Queue(
        min(queue.ready for queue in live),
        mean,
        min(queue.least for queue in queues),
        max(queue.depth for queue in live),
        max(queue.slots for queue in live),
        max(queue.used for queue in live),
    )


class Meter:
    """Sums the reports of the threads of one phase. Its lock is acquired once per block of records.

    Attributes:
        phase, plan, rank: see `Summary`.
        counters: functions that return more costs, each as the key of a line and fields of `LineUsage`. The
            summary adds them: they count without a lock.
        batches, ready, wait_s: see `count_batch`. The sums over all batches. Only the thread that hands out
            batches writes them.
        least: the minimum of ready batches, as in `Queue`; None before the second batch.
        checked: the number of records whose ids were compared with the contract of their visit.
    """

    def __init__(self, phase: str, plan: str = "", rank: int = 0) -> None:
        self.phase, self.plan, self.rank = phase, plan, rank
        self._lines: dict[str, LineUsage] = {}
        self._costs: dict[str, dict[str, float]] = {}  # fields of `LineUsage`, by line
        self.counters: list[Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]] = []
        self._slow: dict[int, Slow] = {}  # by member
        self._lock = threading.Lock()
        self._now = Summary(phase, (), 0, 0.0, 0.0)  # holds `workers` and `restarts`; `summary` sets the rest
        self.batches, self.ready, self.wait_s = 0, 0, 0.0
        self.least: int | None = None
        self.checked = 0

    def line(self, key: str, label: str, span: Span) -> None:
        """Add the line to which later reports with `key` belong, unless it exists.

        Args:
            key: the id of the stage's first result.
            label: see `LineUsage.what`.
            span: the place in the plan.
        """
        self._lines.setdefault(key, LineUsage(label, span))
        self._costs.setdefault(key, defaultdict(int))

    def add(self, key: str, **costs: float) -> None:
        """Add `costs`, fields of `LineUsage`, to line `key`; `system_s` is a part of `cpu_s`."""
        with self._lock:
            sums = self._costs[key]
            for name, cost in costs.items():
                sums[name] += cost

    def working(self, key: str, *, waits: bool = False) -> _Working:
        """Count the CPU seconds of the body on line `key`; with `waits`, also its wall seconds as waiting."""
        return _Working(self, key, waits)

    def count_batch(self, ready: int, wait_s: float, *, first: bool = False) -> None:
        """Count a batch that was handed out.

        Args:
            ready: the number of ready batches.
            wait_s: seconds that the caller waited.
            first: the batch is the first of an epoch, before which no work is done ahead.
        """
        self.batches += 1
        self.wait_s += wait_s
        self.ready += ready
        if not first:
            self.least = ready if self.least is None else min(self.least, ready)

    def workers(self, label: str) -> None:
        """Set the description of the workers, such as `2 threads`."""
        with self._lock:
            self._now = replace(self._now, workers=label)

    def restarted(self) -> None:
        """Count a worker process that died and was replaced."""
        with self._lock:
            self._now = replace(self._now, restarts=self._now.restarts + 1)

    def slowed(self, member: int, behind: int, wait_s: float = 0.0) -> None:
        """Record that a member is behind.

        Args:
            member: the index of the member.
            behind: the number of records that it is behind the fastest member now.
            wait_s: seconds for which others have waited for it since the last report.
        """
        with self._lock:
            before = self._slow.get(member)
            self._slow[member] = Slow(member, behind, wait_s + (before.wait_s if before else 0.0))

    def summary(self, queue: Queue | None = None) -> Summary:
        """The work reported so far.

        Args:
            queue: the current state of the queue; None if there is none. Its `mean` and `least` are set here.
        """
        with self._lock:
            mean = self.ready / self.batches if self.batches else 0.0
            lines = {key: _more(line, self._costs[key]) for key, line in self._lines.items()}
            for key, costs in itertools.chain.from_iterable(counter() for counter in self.counters):
                lines[key] = _more(lines[key], costs)
            return replace(
                self._now,
                batches=self.batches,
                wait_s=self.wait_s,
                checked=self.checked,
                lines=tuple(lines.values()),
                ready_mean=mean,
                queue=replace(queue or Queue(), mean=mean, least=self.least or 0),
                slow=max(self._slow.values(), key=lambda slow: (slow.wait_s, slow.behind), default=None),
                plan=self.plan,
                rank=self.rank,
            )


class _Working:
    """The context manager of `Meter.working`, for one use."""

    __slots__ = ("_cpu_s", "_key", "_meter", "_started_s", "_system_s", "_waits")

    def __init__(self, meter: Meter, key: str, waits: bool) -> None:
        self._meter, self._key, self._waits = meter, key, waits

    def __enter__(self) -> None:
        self._started_s = time.perf_counter()
        self._cpu_s, self._system_s = thread_cpu()

    def __exit__(self, *_: object) -> None:
        cpu_s, system_s = thread_cpu()
        cpu_s -= self._cpu_s
        waited_s = time.perf_counter() - self._started_s if self._waits else 0.0
        self._meter.add(
            self._key, wait_s=waited_s, cpu_s=cpu_s, system_s=min(system_s - self._system_s, cpu_s)
        )
