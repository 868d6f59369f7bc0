"""Tasks on lanes and shared links: who starts when, and who waited for whom.

A task starts when all that it depends on is over, its release time has come and it is first in every one of
its lanes, which serve tasks in the order given. It takes its seconds, or longer where what it uses of the
links is not all there: tasks that run at the same time share links max-min fairly.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commplan.cost.network.max_min import max_min
from commplan.cost.network.network import Floats

TINY = 1e-15  # of a second


@dataclass(frozen=True)
class ScheduledTask:
    """needs: tasks that must be over; begun: those that must have begun. seconds: of the task alone. use: the
    share of each group of links that it takes then; empty for what uses no links. release: when it may start
    at the earliest."""

    lanes: tuple[str, ...]
    needs: tuple[int, ...]
    seconds: float
    use: tuple[float, ...] = ()
    begun: tuple[int, ...] = ()
    release: float = 0.0


@dataclass(frozen=True)
class TaskTiming:
    """When a task ran, and the task that it waited for last; None where it could start at once."""

    start: float
    end: float
    cause: int | None


def play(tasks: Sequence[ScheduledTask]) -> tuple[TaskTiming, ...]:
    """When each task runs. Tasks come in an order in which each could run after those before it."""
    return _Stage(tasks).run()


class _Stage:
    def __init__(self, tasks: Sequence[ScheduledTask]) -> None:
        self.tasks = tasks
        self.now = 0.0
        self.start: list[float | None] = [None] * len(tasks)
        self.end: list[float | None] = [None] * len(tasks)
        self.cause: list[int | None] = [None] * len(tasks)
        self.queue: dict[str, list[int]] = {}
        for index, task in reversed(list(enumerate(tasks))):
            for lane in task.lanes:
                self.queue.setdefault(lane, []).append(index)  # the last entry is first in line
        self.open = [len(set(task.needs)) + len(set(task.begun)) for task in tasks]
        self.frees: dict[int, list[int]] = {}  # over --> who waits
        self.starts: dict[int, list[int]] = {}  # begun --> who waits
        for index, task in enumerate(tasks):
            for need in dict.fromkeys(task.needs):
                self.frees.setdefault(need, []).append(index)
            for need in dict.fromkeys(task.begun):
                self.starts.setdefault(need, []).append(index)
        self.fixed: list[tuple[float, int]] = []
        self.waiting: list[tuple[float, int]] = []  # for their release alone
        self.flows: dict[int, float] = {}  # running on links --> seconds left, alone

    def run(self) -> tuple[TaskTiming, ...]:
        self._begin([index for index, count in enumerate(self.open) if count == 0], None)
        while self.fixed or self.flows or self.waiting:
            self._advance()
        return tuple(
            TaskTiming(start or 0.0, end or 0.0, cause)
            for start, end, cause in zip(self.start, self.end, self.cause, strict=True)
        )

    def _begin(self, ready: list[int], cause: int | None) -> None:
        """Start those of `ready` that are first in their lanes, and whoever only waited for that."""
        todo = [(index, cause) for index in ready]
        while todo:
            index, why = todo.pop(0)
            task = self.tasks[index]
            first = all(self.queue[lane][-1] == index for lane in task.lanes)
            if self.start[index] is not None or self.open[index] or not first:
                continue
            if task.release > self.now:
                heapq.heappush(self.waiting, (task.release, index))
                continue
            self.start[index], self.cause[index] = self.now, why
            if task.seconds > 0 and any(task.use):
                self.flows[index] = task.seconds
            else:
                heapq.heappush(self.fixed, (self.now + task.seconds, index))
            for other in self.starts.get(index, ()):
                self.open[other] -= 1
                todo.append((other, index))

    def _advance(self) -> None:
        rates = self._rates()
        ends = [(self.now + self.flows[index] / rate, index) for index, rate in rates.items()]
        if self.fixed:
            ends.append(self.fixed[0])
        if self.waiting:
            ends.append(self.waiting[0])
        when, first = min(ends)
        for index, rate in rates.items():
            self.flows[index] -= (when - self.now) * rate
        self.now = when
        over = [
            index
            for index, left in self.flows.items()
            if left <= TINY + 1e-12 * self.tasks[index].seconds or index == first
        ]  # the first one in any case: late enough, a float has no number between now and its end
        for index in over:
            del self.flows[index]
        while self.fixed and self.fixed[0][0] <= when + TINY:
            over.append(heapq.heappop(self.fixed)[1])
        for index in sorted(over):
            self._finish(index)
        while self.waiting and self.waiting[0][0] <= when:
            self._begin([heapq.heappop(self.waiting)[1]], None)

    def _rates(self) -> dict[int, float]:
        if len(self.flows) <= 1:
            return dict.fromkeys(self.flows, 1.0)
        rates = _shares(tuple(self.tasks[index].use for index in self.flows))
        return dict(zip(self.flows, rates, strict=True))

    def _finish(self, index: int) -> None:
        self.end[index] = self.now
        ready: list[int] = []
        for lane in self.tasks[index].lanes:
            self.queue[lane].pop()
            if self.queue[lane]:
                ready.append(self.queue[lane][-1])
        for other in self.frees.get(index, ()):
            self.open[other] -= 1
            ready.append(other)
        self._begin(ready, index)


@lru_cache(maxsize=1 << 12)
def _shares(uses: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """The rate of each flow, given the share of each group of links that it takes alone."""
    use: Floats = np.array(uses, np.float64)
    rates: list[float] = max_min(use, np.ones(len(use[0])), np.ones(len(use))).tolist()
    return tuple(rates)


def chain(played: Sequence[TaskTiming]) -> list[int]:
    """The critical path: the task that ended last, what it waited for, and so on; in order of time."""
    if not played:
        return []
    last: int | None = max(range(len(played)), key=lambda index: (played[index].end, -index))
    path: list[int] = []
    while last is not None:
        path.append(last)
        last = played[last].cause
    return path[::-1]
