"""What the input of a phase cost, as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from commplan.ir.types import sized
from commplan.runtime.input.accounting import LineUsage, Queue, Slow, Summary


class Remarked(Protocol):
    """What `remarks` looks at of one process."""

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


def summary_text(summary: Summary) -> str:
    """The plan lines of a phase in columns, below what its batches were waited for."""
    of = f" of plan {summary.plan}" if summary.plan else ""
    where = f"rank {summary.rank}" if summary.ranks == 1 else f"{summary.ranks} ranks"
    batches = f"{summary.batches:,} batch{'es' * (summary.batches != 1)}"
    head = f"input of phase {summary.phase}{of}, {where}: {batches}, waited {summary.wait_s:.3f} s for them"
    rows = [["line", "stage", "records", "bytes", "CPU s", "waited s", "skipped"], *map(_row, summary.lines)]
    shown = rows if summary.skipped else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    table = [
        "  ".join(cell.ljust(width) if column == 1 else cell.rjust(width) for column, (cell, width) in cells)
        for cells in (enumerate(zip(row, widths, strict=True)) for row in shown)
    ]
    return "\n".join([head, *table, *remarks([summary])])


def _row(line: LineUsage) -> list[str]:
    costs = [f"{line.records:,}", sized(line.nbytes), f"{line.cpu_s:.3f}", f"{line.wait_s:.3f}"]
    return [str(line.span.line), line.what, *costs, f"{line.skipped:,}"]


def remarks(summaries: Sequence[Remarked]) -> list[str]:
    """What a phase's queue, checks and members say, in words."""
    sentences: list[str] = []
    own = (summary.queue for summary in summaries if summary.queue and summary.batches)
    queues = [queue for queue in own if queue.depth]  # members with clocks of their own have none
    if queues:
        least = min(queues, key=lambda queue: queue.mean)
        shared = f"; {least.slots} slots of shared memory" if least.slots else ""
        sentences.append(
            f"ready when asked for: {least.mean:.2f} of {least.depth} batches on average, "
            f"at least {min(queue.least for queue in queues)}{shared}"
        )
    if workers := ", ".join(dict.fromkeys(summary.workers for summary in summaries if summary.workers)):
        died = sum(summary.restarts for summary in summaries)
        worse = (
            f"; replaced after their death: {died} worker process{'es' if died > 1 else ''}" if died else ""
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
