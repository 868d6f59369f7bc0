"""Summary of a run: the share of communication in a step, and the time of each plan line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from commplan.recorder.collectives import Run, Slice, by_rank
from commplan.recorder.tasks import Task, last_makes


class Steps(msgspec.Struct, frozen=True):
    """The runs of a phase, each from the begin of its first collective to the next such begin.

    Values are medians over ranks and runs. The first run is not counted: it may compile.

    Attributes:
        seconds, p95: The time of a run.
        communicating: The share of this time with an unfinished collective.
        waiting: The share of this time that the program waits for a collective.
    """

    phase: str
    count: int
    seconds: float
    p95: float
    communicating: float
    waiting: float

    @property
    def hidden(self) -> float:
        """The share of communication during which the program does not wait."""
        return 1 - self.waiting / self.communicating if self.communicating > 0 else 0.0


class Line(msgspec.Struct, frozen=True):
    """The collectives of a plan line with the same name, kind, algorithm and size.

    Attributes:
        count: Their number. A collective of several ranks counts once.
        nbytes: The size of the whole buffer.
        seconds, p95: The time from begin to end on a rank.
        transfer: Seconds from the begin of the last rank to the end of all ranks, the median.
        bandwidth: `nbytes` over `transfer`, in bytes per second.
        waited: Seconds that ranks waited for the last one, summed over ranks.
        last: The ranks that began last, and how often each did, the most frequent first.
        unsure: The number of collectives whose last rank the clocks of hosts do not determine.
        unfinished: The number that did not end.
        predicted: The predicted seconds of a collective, if there is a topology.
    """

    line: int
    name: str
    kind: str
    algorithm: str
    count: int
    nbytes: int
    seconds: float
    p95: float
    transfer: float
    bandwidth: float
    waited: float
    last: tuple[tuple[int, int], ...]
    unsure: int
    unfinished: int
    predicted: float | None

    @property
    def drift(self) -> float | None:
        """The ratio of `transfer` to the predicted time."""
        return self.transfer / self.predicted if self.predicted else None


class Waits(msgspec.Struct, frozen=True):
    """The waits for the batches of a plan line, or its requests to servers.

    Attributes:
        count: Their number on all ranks.
        unfinished: The number that did not end.
        seconds, p95: The time of a wait.
        share: The share of waits in the time from the end of a rank's first wait to the end of its last, the
            median over ranks.
        making: Seconds that a rank needs for its part of a batch, or a server for an answer, the median.
        last: The ranks that made the last part while others waited, and how often, the most frequent first.
    """

    lane: str
    line: int
    name: str
    count: int
    unfinished: int
    seconds: float
    p95: float
    share: float
    making: float
    last: tuple[tuple[int, int], ...]


class Summary(msgspec.Struct, frozen=True):
    """The summary of a run. seconds: from the first begin to the last end."""

    plan: str
    ranks: int
    recorded: int
    seconds: float
    lost: int
    steps: tuple[Steps, ...]
    lines: tuple[Line, ...]
    waits: tuple[Waits, ...] = ()


def summary(run: Run) -> Summary:
    """The summary of `run`, in the order of the plan's lines."""
    everything = (*run.slices, *run.tasks)
    begins, ends = [each.begin for each in everything], [each.end for each in everything]
    alike: dict[tuple[int, str, str, str, int], list[tuple[Slice, ...]]] = {}
    for collective in run.collectives:
        each, details = collective[0], collective[0].details
        kind, algorithm, nbytes = details[:3] if details else ("", "", each.nbytes)
        name = "" if each.line and details else each.name
        alike.setdefault((each.line, name, kind, algorithm, nbytes), []).append(collective)
    phases = sorted({each.phase for each in run.slices if each.step})
    steps = [_steps(run, phase) for phase in phases]
    return Summary(
        run.plan,
        run.ranks,
        len(run.records),
        max(ends, default=0.0) - min(begins, default=0.0),
        run.lost,
        tuple(each for each in steps if each is not None),
        tuple(_line(*key, collectives) for key, collectives in sorted(alike.items())),
        tuple(_waits(run.tasks)),
    )


def _waits(tasks: Sequence[Task]) -> Iterator[Waits]:
    alike: dict[tuple[int, str, str], list[Task]] = {}
    for task in tasks:
        lane = "input" if task.lane == "input" else "requests"
        alike.setdefault((task.line, task.name, lane), []).append(task)
    for (line, name, lane), group in sorted(alike.items()):
        waits = [task for task in group if task.kind in ("wait", "request")]
        making = [
            task.end - task.begin for task in group if task.kind in ("make", "serve") and not task.state
        ]
        seconds = [task.end - task.begin for task in waits]
        last = Counter(make.rank for _, make in last_makes(group))
        yield Waits(
            lane, line, name, len(waits), sum(bool(task.state) for task in waits), _middle(seconds),
            percentile(seconds, 0.95), _middle(_shares(waits)), _middle(making), tuple(last.most_common()),
        )  # fmt: skip


def _shares(waits: Iterable[Task]) -> Iterator[float]:
    """The share of waits in each rank's time, which begins at the end of its first wait."""
    for rank_tasks in by_rank(waits).values():
        window = min(task.end for task in rank_tasks), max(task.end for task in rank_tasks)
        if window[1] > window[0]:
            yield covered(((task.begin, task.end) for task in rank_tasks), window) / (window[1] - window[0])


def _line(
    line: int, name: str, kind: str, algorithm: str, nbytes: int, collectives: Sequence[Sequence[Slice]]
) -> Line:
    whole = [collective for collective in collectives if not any(each.state for each in collective)]
    slices = [each for collective in whole for each in collective]
    seconds = [each.end - each.begin for each in slices]
    transfer = _middle(max(each.transfer for each in collective) for collective in whole)
    late = [max(collective, key=lambda each: each.waited_s) for collective in collectives]
    late = [each for each in late if each.holder is not None]
    last = Counter(each.holder for each in late if each.holder is not None and each.margin > 0)
    predicted = [each.predicted for each in slices if each.predicted is not None]
    return Line(
        line, name, kind, algorithm, len(collectives), nbytes, _middle(seconds), percentile(seconds, 0.95),
        transfer, nbytes / transfer if transfer > 0 else 0.0,
        sum(each.waited_s for collective in collectives for each in collective), tuple(last.most_common()),
        sum(each.margin <= 0 for each in late), len(collectives) - len(whole),
        _middle(predicted) if predicted else None,
    )  # fmt: skip


def _steps(run: Run, phase: str) -> Steps | None:
    """The runs of a phase; None if it has not run twice after its first run."""
    seconds, communicating, waiting = list[float](), list[float](), list[float]()
    runs = 0
    for rank_slices in by_rank(run.slices).values():
        opens = (each.details is not None and each.details.opens == phase for each in rank_slices)
        starts = [place for place, opening in enumerate(opens) if opening]
        starts = [place for place in starts if rank_slices[place].step > 1] or starts
        runs = max([runs, *(rank_slices[place].step for place in starts)])
        for at, until in pairwise(starts):
            opening, after, inside = rank_slices[at], rank_slices[until], rank_slices[at:until]
            took = after.begin - opening.begin
            if after.step != opening.step + 1 or took <= 0:
                continue
            window = (opening.begin, after.begin)
            seconds.append(took)
            communicating.append(covered(((e.begin, e.end) for e in inside), window) / took)
            waiting.append(covered((each.blocked for each in inside), window) / took)
    if not seconds:
        return None
    middles = (_middle(communicating), _middle(waiting))
    return Steps(phase, runs, _middle(seconds), percentile(seconds, 0.95), *middles)


def covered(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """The length of the union of intervals inside `window`."""
    total, last = 0.0, window[0]
    for begin, end in sorted(spans):
        total += max(0.0, min(end, window[1]) - max(begin, last))
        last = max(last, end)
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of `values` do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _middle(values: Iterable[float]) -> float:
    sample = list(values)
    return median(sample) if sample else 0.0
