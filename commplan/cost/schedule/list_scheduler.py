"""Schedules tasks on lanes and shared links.

A task starts when its dependencies are complete, its release time is reached, and it is first in each of its
lanes. A lane serves its tasks in order, one at a time. A task takes its seconds, or longer if it shares
links: tasks that run at the same time have equal shares of a link, except for those that need less.

`prediction` uses it with one task per op of a phase. Times are in seconds from the start of the phase.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

TINY = 1e-15  # seconds, or a share of a link; smaller differences are rounding errors
FULL = 1e-9  # a demand fits a link if it exceeds the free part by less than this fraction


@dataclass(frozen=True)
class LaneTask:
    """A task. Tasks are numbered by their index in the argument of `run_tasks`.

    Attributes:
        lanes: The names of the lanes that it occupies.
        needs: The tasks that must be complete before it starts.
        seconds: Its duration without other tasks.
        use: The share of each link that it uses while it runs alone, at most 1; [links]. Empty if it uses no
            links. In a prediction, the busiest links of a level count as one link.
        begun: The tasks that must have started before it starts.
        release: The earliest start time in seconds.
    """

    lanes: tuple[str, ...]
    needs: tuple[int, ...]
    seconds: float
    use: tuple[float, ...] = ()
    begun: tuple[int, ...] = ()
    release: float = 0.0


@dataclass(frozen=True)
class TaskTiming:
    """The simulated interval of a task.

    Attributes:
        start: The start in seconds.
        end: The end in seconds.
        cause: The task that it waited for last. None if it started at time 0, or waited last for its release.
    """

    start: float
    end: float
    cause: int | None


def run_tasks(tasks: Sequence[LaneTask]) -> tuple[TaskTiming, ...]:
    """Simulate all tasks.

    Args:
        tasks: The tasks. Each must come after the tasks that it depends on, which it names by index.

    Returns:
        The timing of each task, in the order of `tasks`.
    """
    return _Simulation(tasks).run()


class _Simulation:
    """The state of `run_tasks`: tasks that run, and those that wait."""

    def __init__(self, tasks: Sequence[LaneTask]) -> None:
        self.tasks = tasks
        self.now = 0.0
        self.start: list[float | None] = [None] * len(tasks)
        self.end: list[float | None] = [None] * len(tasks)
        self.cause: list[int | None] = [None] * len(tasks)
        self.queue: dict[str, list[int]] = {}  # by lane: its tasks; the last entry is first in line
        for index, task in reversed(list(enumerate(tasks))):
            for lane in task.lanes:
                self.queue.setdefault(lane, []).append(index)
        # By task: the number of dependencies that are not yet met.
        self.open = [len(set(task.needs)) + len(set(task.begun)) for task in tasks]
        self.frees: dict[int, list[int]] = {}  # by task: the tasks that wait for its end
        self.starts: dict[int, list[int]] = {}  # by task: the tasks that wait for its start
        for index, task in enumerate(tasks):
            for need in dict.fromkeys(task.needs):
                self.frees.setdefault(need, []).append(index)
            for need in dict.fromkeys(task.begun):
                self.starts.setdefault(need, []).append(index)
        self.off_network: list[tuple[float, int]] = []  # a heap of the end and task, for those without links
        self.waiting: list[tuple[float, int]] = []  # a heap of the release and task, for those without cause
        self.flows: dict[int, float] = {}  # by running task with links: the remaining seconds at full rate

    def run(self) -> tuple[TaskTiming, ...]:
        """Simulate until no task runs or waits for its release."""
        self._begin([index for index, count in enumerate(self.open) if count == 0], None)
        while self.off_network or self.flows or self.waiting:
            self._advance()
        return tuple(
            TaskTiming(start or 0.0, end or 0.0, cause)
            for start, end, cause in zip(self.start, self.end, self.cause, strict=True)
        )

    def _begin(self, ready: list[int], cause: int | None) -> None:
        """Start the tasks of `ready` that can start, and then those that wait for the start of these.

        `cause` is the task whose end made them ready; None at the beginning, and after a release.
        """
        candidates = [(index, cause) for index in ready]
        while candidates:
            index, waited_for = candidates.pop(0)
            task = self.tasks[index]
            is_first = all(self.queue[lane][-1] == index for lane in task.lanes)
            if self.start[index] is not None or self.open[index] or not is_first:
                continue
            if task.release > self.now:
                heapq.heappush(self.waiting, (task.release, index))
                continue
            self.start[index], self.cause[index] = self.now, waited_for
            if task.seconds > 0 and any(task.use):
                self.flows[index] = task.seconds
            else:
                heapq.heappush(self.off_network, (self.now + task.seconds, index))
            for dependent in self.starts.get(index, ()):
                self.open[dependent] -= 1
                candidates.append((dependent, index))

    def _advance(self) -> None:
        """Advance to the next end or release of a task."""
        rates = self._rates()
        ends = [(self.now + self.flows[index] / rate, index) for index, rate in rates.items()]
        if self.off_network:
            ends.append(self.off_network[0])
        if self.waiting:
            ends.append(self.waiting[0])
        when, first = min(ends)
        for index, rate in rates.items():
            self.flows[index] -= (when - self.now) * rate
        self.now = when
        # The first one always ends: its remaining time may be below the resolution of floats.
        ended = [
            index
            for index, remaining in self.flows.items()
            if remaining <= TINY + 1e-12 * self.tasks[index].seconds or index == first
        ]
        for index in ended:
            del self.flows[index]
        while self.off_network and self.off_network[0][0] <= when + TINY:
            ended.append(heapq.heappop(self.off_network)[1])
        for index in sorted(ended):
            self._finish(index)
        while self.waiting and self.waiting[0][0] <= when:
            self._begin([heapq.heappop(self.waiting)[1]], None)

    def _rates(self) -> dict[int, float]:
        """The rate of each task with links, as a fraction of its rate when it runs alone."""
        if len(self.flows) <= 1:
            return dict.fromkeys(self.flows, 1.0)
        rates = shares_of_links(tuple(self.tasks[index].use for index in self.flows))
        return dict(zip(self.flows, rates, strict=True))

    def _finish(self, index: int) -> None:
        """End a task, free its lanes, and start the tasks that waited for it."""
        self.end[index] = self.now
        ready: list[int] = []
        for lane in self.tasks[index].lanes:
            self.queue[lane].pop()
            if self.queue[lane]:
                ready.append(self.queue[lane][-1])
        for dependent in self.frees.get(index, ()):
            self.open[dependent] -= 1
            ready.append(dependent)
        self._begin(ready, index)


@lru_cache(maxsize=1 << 12)
def shares_of_links(uses: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """The rate of concurrent flows on shared links; cached, because the same combinations recur.

    Each link is divided equally among its flows. Flows that need less, or that another link slows, leave the
    rest to the others.

    Args:
        uses: For each flow, the share of each link that it uses while it runs alone. At least one flow.

    Returns:
        For each flow, the fraction of the rate at which it runs alone, at most 1.
    """
    rates = [1.0] * len(uses)
    free = [1.0] * len(uses[0])
    growing = set(range(len(uses)))
    while growing:
        needs = [[uses[flow][link] for flow in growing] for link in range(len(free))]
        full = max(range(len(free)), key=lambda link: sum(needs[link]) / free[link])
        if sum(needs[full]) <= free[full] * (1 + FULL):
            break
        levels = [_level(sorted(need), capacity) for need, capacity in zip(needs, free, strict=True)]
        slowed = [flow for flow in growing if uses[flow][full] > levels[full]]
        for flow in slowed:
            rates[flow] = min(
                (level / use for use, level in zip(uses[flow], levels, strict=True) if use > level)
            )
            free = [
                max(TINY, capacity - rates[flow] * use)
                for capacity, use in zip(free, uses[flow], strict=True)
            ]
        growing -= set(slowed)
    return tuple(rates)


def _level(needs: Sequence[float], free: float) -> float:
    """The largest share such that a link can give each flow the smaller of this share and its need.

    Infinite if all needs fit. `needs` are in ascending order; `free` is the free part of the link.
    """
    for index, need in enumerate(needs):
        share = free / (len(needs) - index)
        if need > share:
            return share
        free -= need
    return math.inf


def critical_path(timings: Sequence[TaskTiming]) -> list[int]:
    """The critical path as tasks in the order of time: the last one to end is preceded by its causes.

    Empty without tasks. If several tasks end last, the path ends with the first of them.
    """
    if not timings:
        return []
    last: int | None = max(range(len(timings)), key=lambda index: (timings[index].end, -index))
    path: list[int] = []
    while last is not None:
        path.append(last)
        last = timings[last].cause
    return path[::-1]
