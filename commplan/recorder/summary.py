"""Summary of a run: the share of communication in a step, and the times of each plan line.

`commplan trace` prints it. It is computed from a `collectives.Run`, on the time scale of the run.
"""

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

    Values are over all ranks and runs, except the first run, which may compile.

    Attributes:
        phase: The name of the phase.
        count: How often the phase has run, including the first run: the maximum over ranks.
        seconds: The median time of a run in seconds.
        p95: The 95th percentile of this time in seconds, see `percentile`.
        communicating: The share of a run, between 0 and 1, with an unfinished collective, the median.
        waiting: The share of a run during which the program waits for a collective, the median.
    """

    phase: str
    count: int
    seconds: float
    p95: float
    communicating: float
    waiting: float

    @property
    def hidden(self) -> float:
        """The share of communication during which the program does not wait; 0 without communication."""
        return 1 - self.waiting / self.communicating if self.communicating > 0 else 0.0


class Line(msgspec.Struct, frozen=True):
    """The collectives of a plan line with the same name, kind, algorithm and size.

    Times are over all ranks and all collectives that ended on all recorded ranks; 0 if there is none.

    Attributes:
        line: The plan line; 0 for whole steps.
        name: The name of the operation; empty if `line` and `kind` identify it.
        kind: The kind of collective; empty for whole steps.
        algorithm: The algorithm; empty for whole steps.
        count: The number of collectives. A collective of several ranks counts once.
        nbytes: The size of the whole buffer; the bytes that move on the first rank if `kind` is empty.
        seconds: The median time from begin to end on a rank, in seconds.
        p95: The 95th percentile of this time, see `percentile`.
        transfer: Seconds from the begin of the last rank to the end of all ranks, the median.
        bandwidth: `nbytes / transfer`, in bytes per second; 0 if `transfer` is 0.
        waited: Seconds for which ranks waited for a later one, summed over ranks and all collectives.
        last: The ranks that began last, and how often each did, the most frequent first.
        unsure: The number of collectives whose last rank the clocks of hosts do not determine.
        unfinished: The number of collectives that have failed or not ended on a rank.
        predicted: The predicted seconds of a collective, the median; None without a prediction.
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
        """The ratio of `transfer` to the predicted time; None if that is 0 or unknown."""
        return self.transfer / self.predicted if self.predicted else None


class Waits(msgspec.Struct, frozen=True):
    """The waits for the batches of a plan line, or its requests to servers.

    Attributes:
        lane: `input` for batches, `requests` for requests.
        line: The plan line; 0 if the name has none.
        name: The name of the operations, such as `line 9 of x.plan`.
        count: The number of waits or requests on all ranks.
        unfinished: The number of them that have failed or not ended.
        seconds: The median time of a wait, in seconds; 0 without waits.
        p95: The 95th percentile of this time, see `percentile`.
        share: The share of waits, between 0 and 1, in the time from the end of a rank's first wait to the end
            of its last, the median over ranks.
        making: Seconds that a rank needs for its part of a batch, or a server for an answer, the median; 0 if
            none was made.
        last: The ranks that made the last part of a batch while others waited, and for how many waits, the
            most frequent first.
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
    """The summary of a run.

    Attributes:
        plan: The name of the plan.
        ranks: The number of ranks, including servers.
        recorded: The number of ranks with a record.
        seconds: The seconds from the first begin to the last end of an operation; 0 without operations.
        lost: The number of events that the ring buffers have dropped.
        steps: The runs of each phase that ran often enough to be measured, by name.
        lines: The collectives, in order of their plan line.
        waits: The waits for batches and servers, in order of their plan line.
    """

    plan: str
    ranks: int
    recorded: int
    seconds: float
    lost: int
    steps: tuple[Steps, ...]
    lines: tuple[Line, ...]
    waits: tuple[Waits, ...] = ()


def summary(run: Run) -> Summary:
    """Summarize a run."""
    operations = (*run.slices, *run.tasks)
    begins, ends = [each.begin for each in operations], [each.end for each in operations]
    # By line, name, kind, algorithm and nbytes.
    groups: dict[tuple[int, str, str, str, int], list[tuple[Slice, ...]]] = {}
    for collective in run.collectives:
        each, details = collective[0], collective[0].details
        kind, algorithm, nbytes = details[:3] if details else ("", "", each.nbytes)
        name = "" if each.line and details else each.name
        groups.setdefault((each.line, name, kind, algorithm, nbytes), []).append(collective)
    phases = sorted({each.phase for each in run.slices if each.step})
    steps = [_steps(run, phase) for phase in phases]
    return Summary(
        run.plan,
        run.ranks,
        len(run.records),
        max(ends, default=0.0) - min(begins, default=0.0),
        run.lost,
        tuple(each for each in steps if each is not None),
        tuple(_line(*key, collectives) for key, collectives in sorted(groups.items())),
        tuple(_waits(run.tasks)),
    )


def _waits(tasks: Sequence[Task]) -> Iterator[Waits]:
    """The waits and requests of each name, in order of their plan line."""
    groups: dict[tuple[int, str, str], list[Task]] = {}  # by line, name and lane
    for task in tasks:
        lane = "input" if task.lane == "input" else "requests"  # records of servers are in another lane
        groups.setdefault((task.line, task.name, lane), []).append(task)
    for (line, name, lane), group in sorted(groups.items()):
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
    """The share of waits in the time of each rank between the ends of its first and last waits.

    Ranks without such a time are omitted.
    """
    for rank_tasks in by_rank(waits).values():
        window = min(task.end for task in rank_tasks), max(task.end for task in rank_tasks)
        if window[1] > window[0]:
            yield covered(((task.begin, task.end) for task in rank_tasks), window) / (window[1] - window[0])


def _line(
    line: int, name: str, kind: str, algorithm: str, nbytes: int, collectives: Sequence[Sequence[Slice]]
) -> Line:
    """The summary of collectives with the same properties, at least one. For the arguments, see `Line`."""
    ended = [collective for collective in collectives if not any(each.state for each in collective)]
    slices = [each for collective in ended for each in collective]
    seconds = [each.end - each.begin for each in slices]
    transfer = _middle(max(each.transfer for each in collective) for collective in ended)
    # The slice of each collective that waited longest: its holder began last of all ranks.
    longest = [max(collective, key=lambda each: each.waited_s) for collective in collectives]
    holders = [(each.holder, each.margin) for each in longest if each.holder is not None]
    last = Counter(holder for holder, margin in holders if margin > 0)
    predicted = [each.predicted for each in slices if each.predicted is not None]
    return Line(
        line=line,
        name=name,
        kind=kind,
        algorithm=algorithm,
        count=len(collectives),
        nbytes=nbytes,
        seconds=_middle(seconds),
        p95=percentile(seconds, 0.95),
        transfer=transfer,
        bandwidth=nbytes / transfer if transfer > 0 else 0.0,
        waited=sum(each.waited_s for collective in collectives for each in collective),
        last=tuple(last.most_common()),
        unsure=sum(margin <= 0 for _, margin in holders),
        unfinished=len(collectives) - len(ended),
        predicted=_middle(predicted) if predicted else None,
    )


def _steps(run: Run, phase: str) -> Steps | None:
    """The runs of a phase; None if no rank has the begins of two consecutive runs after the first.

    The first run, which may compile, is omitted.
    """
    seconds, communicating, waiting = list[float](), list[float](), list[float]()
    runs = 0
    for rank_slices in by_rank(run.slices).values():
        # The indices of the slices with which a run after the first begins.
        starts = [
            index
            for index, each in enumerate(rank_slices)
            if each.details is not None and each.details.opens == phase and each.step > 1
        ]
        runs = max([runs, *(rank_slices[index].step for index in starts)])
        for start, stop in pairwise(starts):
            opening, after, inside = rank_slices[start], rank_slices[stop], rank_slices[start:stop]
            duration = after.begin - opening.begin
            if after.step != opening.step + 1 or duration <= 0:  # events of the runs between them are lost
                continue
            window = (opening.begin, after.begin)
            seconds.append(duration)
            communicating.append(covered(((each.begin, each.end) for each in inside), window) / duration)
            waiting.append(covered((each.blocked for each in inside), window) / duration)
    if not seconds:
        return None
    middles = (_middle(communicating), _middle(waiting))
    return Steps(phase, runs, _middle(seconds), percentile(seconds, 0.95), *middles)


def covered(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """The length of the part of `window` that is in the union of `spans`, all (begin, end) in seconds."""
    total, covered_until = 0.0, window[0]
    for begin, end in sorted(spans):
        total += max(0.0, min(end, window[1]) - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """The value with index `int(share * n)` among the n values in ascending order; 0 without values.

    Args:
        values: The values, in any order.
        share: Between 0 and 1. For 1, the result is the greatest value.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _middle(values: Iterable[float]) -> float:
    """The median; 0 without values."""
    sample = list(values)
    return median(sample) if sample else 0.0
