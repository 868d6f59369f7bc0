"""What the ranks of a run did beside their collectives: batches made and awaited, requests asked and
served."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from commplan.recorder.file import BEGIN, END, FAILED, Event, Record

_LINE = re.compile(r"line (\d+)")
_TITLES = {"make": "make batch", "wait": "wait for batch", "request": "request", "serve": "serve request"}


class Task(NamedTuple):
    """One of them on one rank. kind: see `lane.Kind`. shared: a word that those have in common who do it
    together. number: of the batch or the request. detail: see `lane.Lane.begin`. begin, end: seconds on the
    scale of the run. state: `unfinished`, `failed`, or nothing."""

    rank: int
    lane: str
    name: str
    kind: str
    shared: str
    number: int
    detail: int
    begin: float
    end: float
    state: str

    @property
    def line(self) -> int:
        """The plan's, 0 where the name has none."""
        match = _LINE.match(self.name)
        return int(match[1]) if match else 0

    @property
    def title(self) -> str:
        """`line 9: make batch 7`."""
        where = f"line {self.line}" if self.line else self.name
        return f"{where}: {_TITLES.get(self.kind, self.kind)} {self.number}"


class Link(NamedTuple):
    """Something came from one task to another. left, arrived: seconds on the scale of the run."""

    source: Task
    left: float
    target: Task
    arrived: float


def tasks_of(records: Iterable[Record], shift: Callable[[Record], float], latest: float) -> list[Task]:
    """In the order in which they began. shift: seconds from a record's time to that of the run, whose last
    event was at `latest`."""
    tasks = [task for record in records if record.lane for task in _tasks(record, shift(record), latest)]
    return sorted(tasks, key=lambda task: (task.begin, task.rank))


def _tasks(record: Record, shift: float, latest: float) -> Iterator[Task]:
    ends = {event.operation: event for event in record.events if event.kind in (END, FAILED)}
    for event in record.events:
        if event.kind == BEGIN and event.details is not None:
            begin, end = event.seconds + shift, ends.get(event.operation)
            yield Task(
                record.rank, record.lane, event.name, event.details.kind, event.details.algorithm, event.runs,
                event.nbytes, begin, max(begin, end.seconds + shift if end else latest), _state(end),
            )  # fmt: skip


def _state(end: Event | None) -> str:
    return "unfinished" if end is None else "failed" if end.kind == FAILED else ""


def links(tasks: Sequence[Task]) -> list[Link]:
    """A batch from the rank that made the last part of it to each that waited for that; a request from the
    worker that asks to the server, and what that answers."""
    results: list[Link] = []
    for wait, make in last_makes(tasks):
        results.append(Link(make, make.end, wait, wait.end))
    asked = {(task.rank, task.line, task.number): task for task in tasks if task.kind == "request"}
    for serve in (task for task in tasks if task.kind == "serve"):
        request = asked.get((serve.detail, serve.line, serve.number))
        if request is not None and request.begin <= serve.begin:
            results.append(Link(request, request.begin, serve, serve.begin))
            if not serve.state and serve.end <= request.end:  # what is put may be heard later
                results.append(Link(serve, serve.end, request, request.end))
    return results


def last_makes(tasks: Sequence[Task]) -> Iterator[tuple[Task, Task]]:
    """Each wait for a batch with what made the last part of it, where another rank made that meanwhile."""
    last: dict[tuple[str, str, int], Task] = {}
    for task in tasks:
        key = task.shared, task.name, task.number
        if task.kind == "make" and task.shared != "-" and (key not in last or task.end > last[key].end):
            last[key] = task
    for task in tasks:
        make = last.get((task.shared, task.name, task.number)) if task.kind == "wait" else None
        if make is not None and make.rank != task.rank and task.begin < make.end <= task.end:
            yield task, make
