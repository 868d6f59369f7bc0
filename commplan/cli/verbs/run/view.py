"""The live view of `commplan run`: current input costs of each line on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from commplan.cli.console import Console

if TYPE_CHECKING:
    from commplan.runtime.input.observe.accounting import Summary

PERIOD_S = 0.5  # least seconds between updates
SHARE = 0.008  # most CPU time of drawing, as a fraction of a core
Progress = Callable[[str, int, int], None]  # receives a phase, its completed calls and all its calls


@contextmanager
def live(
    console: Console, summaries: Callable[[], Sequence[Summary]], title: str = "", *, quiet: bool = False
) -> Generator[Progress | None]:
    """A context with a table on stderr, redrawn at most twice a second if stderr is a terminal.

    Args:
        console: the output.
        summaries: returns the current input costs.
        title: text above the table.
        quiet: whether to draw nothing, on ranks other than the first.

    Yields:
        A progress callback for the rehearsal, or None if nothing is drawn. The table disappears when the
        context ends.
    """
    if quiet or not console.is_human or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console as Rich
    from rich.live import Live

    screen = Rich(stderr=True, no_color=not console.color(sys.stderr), highlight=False)
    view = View(summaries, title)
    with Live(console=screen, auto_refresh=False, transient=True, redirect_stdout=False) as shown:
        ended = threading.Event()

        def keep_drawing() -> None:
            pause = PERIOD_S
            while not ended.wait(pause):
                before = time.thread_time()
                shown.update(view.table(), refresh=True)
                pause = max(PERIOD_S, (time.thread_time() - before) / SHARE)

        thread = threading.Thread(target=keep_drawing, name="commplan-view", daemon=True)
        shown.update(view.table(), refresh=True)
        thread.start()
        try:
            yield view.progress
        finally:
            ended.set()
            thread.join()
            shown.update(view.table(), refresh=True)


@dataclass
class View:
    """The table: costs from `summaries`, and changes since the last update.

    Attributes:
        summaries: returns the current input costs.
        title: text above the table; empty for none.
        _progress: completed calls and all calls, by phase.
        _before: records and CPU seconds at the last update, by phase, plan line and work.
        _updated_s: time of the last update, by `time.perf_counter`.
    """

    summaries: Callable[[], Sequence[Summary]]
    title: str = ""
    _progress: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    _before: dict[tuple[str, int, str], tuple[int, float]] = field(
        default_factory=dict[tuple[str, int, str], tuple[int, float]]
    )
    _updated_s: float = field(default_factory=time.perf_counter)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Record the number of completed calls of a phase."""
        self._progress[phase] = (done, total)

    def table(self) -> Any:
        """The current table, as a rich renderable."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        time_s = time.perf_counter()
        passed, self._updated_s = max(time_s - self._updated_s, 1e-9), time_s  # a divisor, so not 0
        # A copy, since the thread of the run may add a phase.
        progress = list(self._progress.items())
        head = ", ".join(f"{phase} {done}/{total}" for phase, (done, total) in progress)
        parts: list[Any] = [Text(f"{self.title}: {head}" if self.title and head else self.title or head)]
        for summary in self.summaries():
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column("line", justify="right")
            table.add_column(summary.phase, overflow="ellipsis", no_wrap=True, min_width=12)
            for name in ("records", "/s", "user s", "system s", "of a core", "waited s"):
                table.add_column(name, justify="right", no_wrap=True)
            for line in summary.lines:
                key = (summary.phase, line.span.line, line.what)
                records, cpu_s = self._before.get(key, (0, 0.0))
                self._before[key] = (line.records, line.cpu_s)
                label = Text(line.what + (f" ({line.skipped} skipped)" if line.skipped else ""))
                rate, share = (line.records - records) / passed, (line.cpu_s - cpu_s) / passed
                spent = f"{line.user_s:.2f}", f"{line.system_s:.2f}", f"{share:.0%}", f"{line.wait_s:.2f}"
                table.add_row(str(line.span.line), label, str(line.records), f"{rate:.0f}", *spent)
            parts += [table, Text(_state(summary))]
        return Group(*parts)


def _state(summary: Summary) -> str:
    """The state of the input of a phase in words: batches, queue, workers, slots and lags."""
    queue = summary.queue
    words = [
        f"{summary.batches} batches, waited {summary.wait_s:.2f} s for them",
        f"ready {queue.ready} of {queue.depth} (mean {queue.mean:.1f}, least {queue.least})",
    ]
    if summary.workers:
        words.append(summary.workers)
    if queue.slots:
        words.append(f"slots {queue.used} of {queue.slots}")
    if summary.checked:
        words.append(f"{summary.checked} ids checked")
    if summary.slow:
        words.append(f"member {summary.slow.member} is {summary.slow.behind} records behind")
    return ", ".join(words)
