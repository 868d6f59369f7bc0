"""Export the costs of the input to Prometheus, in the format that the library `prometheus_client` writes.

The metrics are written to a file for the text file collector of node_exporter, or served at an address. A run
collects the costs in a `Ledger`, and `run.metrics` makes the `Metrics`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from commplan import io
from commplan.diagnostics import fail, import_optional
from commplan.runtime.input.observe.accounting import Meter, Summary, merged
from commplan.wait import Wait, check_seconds, until

PERIOD_S = 10.0  # Seconds between two writes, by default.
STUCK_S = 10.0  # Seconds until a write counts as hung.
LOOPBACK = "127.0.0.1"  # The host of an address without one.


class Measured(Protocol):
    """Batches that report their costs."""

    def summary(self) -> Summary:
        """The costs so far."""
        ...


@dataclass
class _Entry:
    """A meter, and the batches whose work it adds up."""

    meter: Meter
    users: list[weakref.ref[Measured]]


@dataclass
class Ledger:
    """Adds up the input work of a run, of current and of past batches.

    References to batches are weak; their costs are kept when they are freed.
    """

    # The meters of batches that exist, by the id of the meter.
    _entries: dict[int, _Entry] = field(default_factory=dict[int, _Entry])
    # The costs of all freed batches, by phase.
    _past: dict[str, Summary] = field(default_factory=dict[str, Summary])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, batches: Measured, meters: Iterable[Meter]) -> None:
        """Count `batches`, whose work `meters` add up. Several members may share a meter."""
        with self._lock:
            for meter in meters:
                self._entries.setdefault(id(meter), _Entry(meter, [])).users.append(weakref.ref(batches))

    def summaries(self) -> list[Summary]:
        """One summary for each phase that had batches, past ones included.

        Phases with freed batches come first, and then the others in the order of their first batches.
        """
        with self._lock:
            ended: list[Summary] = []
            summaries = dict(self._past)
            for key, entry in list(self._entries.items()):
                live = [source.summary().queue for user in entry.users if (source := user()) is not None]
                # Members that share a stream have a queue each: report the shortest one.
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
    """Add `summary` to the one of its phase."""
    before = summaries.get(summary.phase)
    summaries[summary.phase] = summary if before is None else merged((before, summary))


class Metrics:
    """The costs of a run's input, in a file, at an address for scraping, or both. Made by `run.metrics`.

    The file is written at once, every `period_s` seconds, and by `close`. It is always complete: each version
    is written to a temporary file, which is then renamed. A failure in the background (a full disk) is
    reported once, as a RuntimeWarning; the next write is a period later.

    Args:
        path: The file, or None to write none.
        summaries: Returns the costs so far.
        period_s: Seconds between two writes.
        listens: The host and the port at which to answer, or None. Port 0 is any free port.

    Attributes:
        path: The file that this process writes, or None.
        period_s: Seconds between two writes.
        address: `host:port` at which this process answers, or "".

    Raises:
        CommplanError: CP0960 if the file or the port cannot be used; CP0962 without prometheus-client.
    """

    def __init__(
        self,
        path: Path | None,
        summaries: Callable[[], Sequence[Summary]],
        period_s: float,
        listens: tuple[str, int] | None = None,
    ) -> None:
        self.path, self.period_s, self.address = path, period_s, ""
        self._summaries, self._server = summaries, None
        self._end, self._writing, self._warned = threading.Event(), threading.Lock(), False
        self.write()
        if listens is not None:
            self._server, self._answering = _served(*listens, summaries)
            self.address = f"{listens[0]}:{self._server.server_port}"
        threading.Thread(target=self._keep, name="commplan-metrics", daemon=True).start()

    def write(self) -> None:
        """Write the file now, if there is one. Raises CP0960 if that fails, or if another write hangs."""
        if self.path is None:
            return
        until(lambda seconds: self._writing.acquire(timeout=seconds), Wait(STUCK_S, self._stuck))
        try:
            write(self.path, text(self._summaries()))
        finally:
            self._writing.release()

    def close(self) -> None:
        """Write the file a last time and stop. Later calls have no effect. Raises CP0960 as `write`."""
        if self._end.is_set():
            return
        self._end.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self.write()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self) -> None:
        """Write the file periodically, and check that the server answers; the body of a thread."""
        while not self._end.wait(self.period_s):
            try:
                self.write()
                if self._server is not None and not self._answering.is_alive():
                    self._warn(f"the server at {self.address} no longer answers")
            except BaseException as error:  # noqa: BLE001  this thread continues after every error
                self._warn(f"{self.path} was not written: {error}")

    def _warn(self, message: str) -> None:
        """Warn the first time, unless `close` was called."""
        if not self._warned and not self._end.is_set():
            self._warned = True
            with contextlib.suppress(RuntimeWarning):  # Warnings may be errors.
                warnings.warn(f"metrics are not updated: {message}", RuntimeWarning, 2)

    def _stuck(self, waited: float) -> NoReturn:
        fail("CP0960", f"metrics cannot be written to {self.path}: a write has hung for {waited:.0f} s")


def start_metrics(
    summaries: Callable[[], Sequence[Summary]], process: tuple[int, int], path: str | os.PathLike[str] | None,
    period_s: float, address: str | None,
) -> Metrics:  # fmt: skip
    """Create the metrics of `run.metrics`.

    Args:
        summaries: Returns the costs so far.
        process: The number of this process, and the number of processes.
        path: See `rank_file`; None to write no file.
        period_s: Seconds between two writes.
        address: See `listening`; None to answer at none.

    Raises:
        CommplanError: CP0961 for an invalid period; CP0963 for an invalid address; those of `Metrics`.
    """
    period, file = checked_period(period_s), None if path is None else rank_file(path, *process)
    return Metrics(file, summaries, period, None if address is None else listening(address, process[0]))


def close_quietly(metrics: Metrics) -> None:
    """Close `metrics` in a finalizer; errors are ignored."""
    with contextlib.suppress(Exception):
        metrics.close()


def checked_period(period_s: float) -> float:
    """`period_s` as a float. Raises CP0961 if it is not a valid number of seconds; see `check_seconds`."""
    check_seconds("CP0961", "period_s", period_s)
    return float(period_s)


def listening(address: str, rank: int) -> tuple[str, int]:
    """The host and the port at which process `rank` answers.

    `address` is `9464`, for the loopback interface, or `host:9464`. The number of the rank is added to the
    port. Port 0 is any free port, for all ranks. Raises CP0963 if `address` is invalid.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        fail("CP0963", f"{address!r} is not an address", "expected PORT, or HOST:PORT, up to 65535")
    return host.strip("[]") or LOOPBACK, int(port) + (rank if int(port) else 0)


def rank_file(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """The file of process `rank` of `ranks`.

    `{rank}` in the path is replaced by its number. If there are several ranks and `{rank}` is missing,
    `costs.prom` becomes `costs.rank3.prom`.
    """
    pattern = os.fspath(path)
    if "{rank}" in pattern:
        return Path(pattern.replace("{rank}", str(rank)))
    target = Path(pattern)
    return target.with_name(f"{target.stem}.rank{rank}{target.suffix}") if ranks > 1 else target


def write(path: Path, content: str) -> None:
    """Write a file atomically. Raises CP0960 if it cannot be written."""
    try:
        io.write(path, content.encode())
    except (OSError, ValueError) as error:
        fail(
            "CP0960",
            f"metrics cannot be written to {path}: {getattr(error, 'strerror', None) or error}",
            "expected: a file in a folder that exists and may be written to",
        )


def text(summaries: Iterable[Summary]) -> str:
    """The contents of the file: one family of samples after another, each with the samples of all phases."""
    collected = list(summaries)
    return _client().generate_latest(_registry(lambda: collected)).decode()


def _served(host: str, port: int, summaries: Callable[[], Sequence[Summary]]) -> tuple[Any, Any]:
    """Start a server of the metrics; returns it and its thread. Raises CP0960 if it cannot be started."""
    try:
        return _client().start_http_server(port, host, _registry(summaries))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        fail("CP0960", f"metrics cannot be served at {host}:{port}: {why}", "give an address of this host")


def _client(module: str = "prometheus_client") -> Any:
    """A module of Prometheus. Raises CP0962 if it is not installed."""
    return import_optional(module, "CP0962", "metrics", "'commplan[metrics]'")


def _registry(summaries: Callable[[], Sequence[Summary]]) -> Any:
    """A registry that calls `summaries` whenever it is read."""
    registry = _client().CollectorRegistry()
    registry.register(_Collector(summaries))
    return registry


class _Collector(NamedTuple):
    """A collector of `prometheus_client`, which calls `collect` whenever metrics are read."""

    summaries: Callable[[], Sequence[Summary]]

    def collect(self) -> Iterator[Any]:
        """The families, each with its samples."""
        core, families = _client("prometheus_client.core"), dict[str, Any]()
        for name, help_, labels, value in chain.from_iterable(map(_samples, self.summaries())):
            kind = core.CounterMetricFamily if name.endswith("_total") else core.GaugeMetricFamily
            if name not in families:
                families[name] = kind(f"commplan_input_{name}", help_, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()


def _samples(summary: Summary) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """The samples of `summary`, each with the name and the help of its family, its labels, and its value."""
    common = {"plan": summary.plan, "phase": summary.phase, "rank": str(summary.rank)}
    slow = [] if summary.slow is None else [(common | {"member": str(summary.slow.member)}, summary.slow)]
    lines = [(common | {"line": str(each.span.line), "stage": each.what}, each) for each in summary.lines]
    measured = {"line": lines, "phase": [(common, summary)], "slow": slow}
    for name, kind, attribute, help_ in _FAMILIES:
        for labels, each in measured[kind]:
            # User and system time are samples of one family.
            mode = {"mode": attribute.removesuffix("_s")} if name == "cpu_seconds_total" else {}
            yield name, help_, labels | mode, attrgetter(attribute)(each)


# Each family: its name without the prefix, the kind of object that it samples (see `_samples`), the attribute
# of the object, and the help. A name that ends in `_total` is a counter, any other a gauge.
_FAMILIES = (
    ("cpu_seconds_total", "line", "user_s", "CPU time of a plan line's input work."),
    ("cpu_seconds_total", "line", "system_s", "CPU time of a plan line's input work."),
    ("records_total", "line", "records", "Records that a plan line read, mapped or received, once per copy."),
    ("bytes_total", "line", "nbytes", "Bytes of a plan line's results."),
    ("wait_seconds_total", "line", "wait_s", "Time in which a plan line waited for other processes."),
    ("skipped_records_total", "line", "skipped", "Records left out because they failed and the plan skips."),
    ("batches_total", "phase", "batches", "Batches handed out."),
    ("batch_wait_seconds_total", "phase", "wait_s", "Time in which the training waited for a batch."),
    ("checked_records_total", "phase", "checked", "Records whose ids were compared with their contract."),
    ("worker_restarts_total", "phase", "restarts", "Worker processes that died and were replaced."),
    ("ready_batches", "phase", "queue.ready", "Batches that are ready now."),
    ("ready_batches_mean", "phase", "ready_mean", "Batches that were ready at a request, on average."),
    ("ready_batches_least", "phase", "queue.least", "Batches that were ready at a request, at least."),
    ("depth_batches", "phase", "queue.depth", "Batches made ahead at most."),
    ("slots", "phase", "queue.slots", "Slots of the memory that processes share."),
    ("slots_used", "phase", "queue.used", "Slots that hold a batch now."),
    ("slow_member_behind_records", "slow", "behind", "Records that the slowest member is behind."),
    ("slow_member_wait_seconds_total", "slow", "wait_s", "Time in which members waited for the slowest one."),
)
