"""The costs of a rehearsal for each plan line: collected from its processes, and formatted as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import plural
from commplan.ir.assemble import assemble
from commplan.ir.types import sized

if TYPE_CHECKING:
    from rich.console import Console as Rich
    from rich.table import Table

    from commplan.cli.binding import Compiled
    from commplan.explain.report import StageSummary
    from commplan.runtime.input.observe.accounting import LineUsage, Queue, Slow, Summary
    from commplan.runtime.rehearse.rehearse import PhaseTimes, ServerWork


class RehearsedLine(msgspec.Struct, frozen=True):
    """The cost of a plan line in one phase. Input costs are measured, `sent` is a lower bound.

    Input costs are None for lines without input work.

    Attributes:
        line: line number in the plan.
        stage: text of the stage.
        records: processed records.
        cpu_s: CPU seconds, the sum of `user_s` and `system_s`.
        user_s: CPU seconds in user mode.
        system_s: CPU seconds in the kernel.
        nbytes: bytes of the results.
        wait_s: seconds of waiting.
        skipped: skipped records.
        sent: least number of bytes that each rank sends in all calls, to ranks and servers; None for lines
            without communication.
    """

    line: int
    stage: str
    records: int | None = None
    cpu_s: float | None = None
    user_s: float | None = None
    system_s: float | None = None
    nbytes: int | None = None
    wait_s: float | None = None
    skipped: int | None = None
    sent: int | None = None


class RankCost(msgspec.Struct, frozen=True):
    """The input work of one process in one phase.

    Attributes:
        rank: the rank of the process.
        batches: batches that it received.
        wait_s: seconds in which the step waited for a batch.
        cpu_s: CPU seconds of all lines together.
        checked: records whose ids were compared with the visitation contract.
        workers: the threads or processes at work, such as `2 threads`; empty if there are none.
        restarts: worker processes that died and were replaced.
        queue: batches that are ready ahead of the step; None if unknown.
        slow: the slowest member; None if members have one clock, or no member waited.
        lines: the work per plan line.
    """

    rank: int
    batches: int
    wait_s: float
    cpu_s: float
    checked: int
    workers: str
    restarts: int
    queue: Queue | None
    slow: Slow | None
    lines: tuple[RehearsedLine, ...]


class PhaseCost(msgspec.Struct, frozen=True):
    """The cost of one phase.

    Attributes:
        name: name of the phase.
        title: its heading in the plan, such as `each step`.
        calls: number of calls.
        first_s: seconds of the first call on the slowest rank, with compilation; None if unknown.
        call_s: mean seconds of the later calls on the slowest rank; None if there were none.
        batches: batches of the rank that waited longest; 0 without input.
        wait_s: seconds in which that rank waited for batches.
        lines: costs of the plan lines, with the input work of all ranks.
        ranks: the input work of each rank; empty without input.
    """

    name: str
    title: str
    calls: int
    first_s: float | None
    call_s: float | None
    batches: int
    wait_s: float
    lines: tuple[RehearsedLine, ...]
    ranks: tuple[RankCost, ...] = ()


def costs_of(compiled: Compiled, times: Sequence[Sequence[PhaseTimes]]) -> list[PhaseCost]:
    """The costs of each phase. `times` are the times of each worker, each phase by phase in one order."""
    from commplan.explain.report import explain_plan
    from commplan.runtime.input.observe.accounting import merged

    explained = {phase.name: phase for phase in explain_plan(compiled.plan, compiled.schedule).phases}
    costs: list[PhaseCost] = []
    for phase_times in zip(*times, strict=True):
        first, phase = phase_times[0], explained[phase_times[0].name]
        inputs = [summary.input for summary in phase_times if summary.input is not None]
        usage = by_line(merged(inputs).lines if inputs else ())
        waited = max(inputs, key=lambda cost: cost.wait_s, default=None)
        batches, wait_s = (waited.batches, waited.wait_s) if waited else (0, 0.0)
        first_s, call_s = (
            _most(getattr(cost, name) for cost in phase_times) for name in ("first_s", "call_s")
        )
        lines = tuple(_line(line, usage.get(line.line), first.calls) for line in phase.lines)
        header = (first.name, phase.title, first.calls)
        ranks = tuple(map(_rank, inputs))
        costs.append(PhaseCost(*header, first_s, call_s, batches, wait_s, lines, ranks))
    return costs


def by_line(lines: Iterable[LineUsage]) -> dict[int, LineUsage]:
    """Aggregate input costs by plan line. A line may map and then share: its records are counted once."""
    from commplan.runtime.input.observe.accounting import added

    usage_by_line: dict[int, LineUsage] = {}
    for usage in lines:
        before = usage_by_line.setdefault(usage.span.line, usage)
        if before is not usage:
            usage_by_line[usage.span.line] = replace(
                added(before, usage),
                records=max(before.records, usage.records),
                nbytes=max(before.nbytes, usage.nbytes),
            )
    return usage_by_line


def _most(seconds: Iterable[float | None]) -> float | None:
    """The longest duration, or None if all are unknown."""
    return max((duration for duration in seconds if duration is not None), default=None)


def _rank(summary: Summary) -> RankCost:
    lines = tuple(_line_usage(line.span.line, line.what, line) for line in summary.lines)
    return assemble(RankCost, summary, lines=lines)


def _line(line: StageSummary, usage: LineUsage | None, calls: int) -> RehearsedLine:
    """The cost of a line in `calls` calls; `usage` is its input work, or None."""
    once = sum(entry.nbytes for entry in line.traffic) + line.sent
    sent = once * calls if line.traffic or line.sent else None
    if usage is None:
        return RehearsedLine(line.line, line.stage, sent=sent)
    return _line_usage(line.line, line.stage, usage, sent)


def _line_usage(line: int, stage: str, usage: LineUsage, sent: int | None = None) -> RehearsedLine:
    return assemble(RehearsedLine, usage, line=line, stage=stage, sent=sent)


# --- tables ---


def print_tables(
    screen: Rich,
    compiled: Compiled,
    costs: Sequence[PhaseCost],
    servers: Sequence[ServerWork],
    processes: int,
    device: str,
) -> None:
    """Print a table for each phase, one for its ranks if there are several, and one for servers.

    Args:
        screen: the screen.
        compiled: the compiled plan.
        costs: the costs of each phase.
        servers: the work of each server.
        processes: number of processes that were started.
        device: the kind of devices, `cpu` or `gpu`.
    """
    ranks = math.prod(compiled.schedule.mesh_sizes.values())
    devices = f"{ranks} {device.upper()} device{'s' if ranks > 1 else ''}"
    devices_or_ranks = devices if processes == 1 else f"{processes} ranks"
    screen.print(f"plan {compiled.plan.name} on {devices_or_ranks}{_server_note(servers)}", markup=False)
    for cost in costs:
        _phase(screen, cost)
    if servers:
        _serving(screen, servers)


def _table(titles: Iterable[str], wide: str = "") -> Table:
    """A table of numbers, except for the text column `wide`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        if title == wide:
            table.add_column(title, overflow="fold", ratio=1)
        else:
            table.add_column(title, justify="right", no_wrap=True)
    return table


# For each field, its title and the format of its value.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "records": ("records", str),
    "skipped": ("skipped", str),
    "user_s": ("user s", "{:.3f}".format),
    "system_s": ("system s", "{:.3f}".format),
    "nbytes": ("bytes", sized),
    "wait_s": ("waited s", "{:.3f}".format),
    "sent": ("sent by a rank", sized),
}


def _phase(screen: Rich, cost: PhaseCost) -> None:
    """Print the tables of one phase."""
    from rich.text import Text

    from commplan.runtime.input.observe.accounting import remarks

    screen.print(f"\n{_headline(cost)}", markup=False)
    shown = dict(_COLUMNS)
    if not any(line.skipped for line in cost.lines):
        del shown["skipped"]
    table = _table(("line", "stage", *(title for title, _ in shown.values())), "stage")
    for line in cost.lines:
        cells = ((getattr(line, name), text) for name, (_, text) in shown.items())
        written = ("" if value is None else text(value) for value, text in cells)
        table.add_row(str(line.line), Text(line.stage), *written)
    if cost.lines:
        screen.print(table)
    if len(cost.ranks) > 1:
        screen.print(_of_ranks(cost.ranks))
    for remark in remarks(cost.ranks):
        screen.print(remark, markup=False)


def _server_note(servers: Sequence[ServerWork]) -> str:
    """The ranks of the servers as the end of a sentence; empty without servers."""
    match len(servers):
        case 0:
            return ""
        case 1:
            return f", of which rank {servers[0].rank} is a server"
        case _:
            return f", of which {', '.join(str(server.rank) for server in servers)} are servers"


def _serving(screen: Rich, servers: Sequence[ServerWork]) -> None:
    """Print the table of servers, and the workers that they excluded."""
    from rich.text import Text

    screen.print("\nservers")
    request_columns = (
        "requests",
        "in its memory",
        "received",
        "sent",
        "updates",
        "busy s",
        "waited s",
        "CPU s",
    )
    table = _table(("rank", "server", *request_columns), "server")
    for server in servers:
        requests = (str(server.requests), str(server.shared))
        counts = (*requests, sized(server.nbytes), sized(server.answered), str(server.updates))
        seconds = (server.busy_s, server.wait_s, server.cpu_s)
        table.add_row(str(server.rank), Text(server.name), *counts, *(f"{value:.3f}" for value in seconds))
    screen.print(table)
    if lost := sorted({worker for server in servers for worker in server.lost}):
        ranks = ", ".join(map(str, lost))
        screen.print(f"died and excluded: rank{'s' if len(lost) > 1 else ''} {ranks}", markup=False)


def _headline(cost: PhaseCost) -> str:
    """The number of calls of a phase, their times, and the time waited for batches."""
    parts = [f"{cost.title}: {plural(cost.calls, 'call')}"]
    if cost.first_s is not None:
        parts.append(f"first {cost.first_s:.3f} s with compilation")
    if cost.call_s is not None:
        parts.append(f"then {cost.call_s * 1e3:.2f} ms each")
    if cost.batches:
        parts.append(f"{cost.batches} batches, waited {cost.wait_s:.3f} s for them")
    return ", ".join(parts)


def _of_ranks(ranks: Sequence[RankCost]) -> Table:
    """A table of the input work of each rank."""
    waited = ("waited for peers s", "waited for batches s")
    table = _table(("rank", "batches", "CPU s", *waited, "ready: mean", "least"))
    for summary in ranks:
        queue = summary.queue
        ready = (f"{queue.mean:.2f}", str(queue.least)) if queue else ("", "")
        seconds = (summary.cpu_s, sum(line.wait_s or 0.0 for line in summary.lines), summary.wait_s)
        spent = (f"{value:.3f}" for value in seconds)
        table.add_row(str(summary.rank), str(summary.batches), *spent, *ready)
    return table
