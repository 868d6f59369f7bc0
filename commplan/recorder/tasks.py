"""The operations of ranks that are not collectives: batches, waits for batches, and requests to servers.

They and the transfers between them are read from the records of lanes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from commplan.recorder.file import BEGIN, END, FAILED, Event, Record

UNFINISHED = "unfinished"  # the state of an operation that has not ended
_TITLES = {"make": "make batch", "wait": "wait for batch", "request": "request", "serve": "serve request"}


class Task(NamedTuple):
    """An operation of one rank.

    Attributes:
        rank: The rank that performs it.
        lane: The lane that recorded it, see `file.Record`.
        name: Its position in the plan, such as `line 9 of x.plan`.
        kind: See `lane.Kind`.
        shared: A word that is equal on all ranks that share the operation; `-` if there is none.
        number: The number of the batch or the request.
        detail: See `lane.Lane.begin`.
        begin, end: In seconds on the time scale of the run. An unfinished task ends with the last event of
            the run.
        state: `unfinished`, `failed`, or empty.
    """

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
        """The plan line in the name; 0 if there is none."""
        return line_of(self.name)

    @property
    def title(self) -> str:
        """A label for traces, such as `line 9: make batch 7`."""
        where = f"line {self.line}" if self.line else self.name
        return f"{where}: {_TITLES.get(self.kind, self.kind)} {self.number}"


class Link(NamedTuple):
    """A transfer from one task to another.

    Attributes:
        source: The task that sends.
        sent: When it sends, in seconds on the time scale of the run.
        target: The task that receives.
        arrived: When the transfer has arrived, in seconds on the same scale.
    """

    source: Task
    sent: float
    target: Task
    arrived: float


def line_of(name: str) -> int:
    """The plan line in the name of an operation, such as `line 9 of x.plan`; 0 if there is none."""
    match = re.match(r"line (\d+)", name)
    return int(match[1]) if match else 0


def tasks_of(records: Iterable[Record], shift: Callable[[Record], float], latest: float) -> list[Task]:
    """The tasks of a run, in order of their begin, then of their rank.

    Args:
        records: The records of the run. Those of collectives are ignored.
        shift: Returns the seconds to add to times of a record to get times of the run.
        latest: The time of the last event of the run, at which unfinished tasks end.
    """
    tasks = [task for record in records if record.lane for task in _tasks(record, shift(record), latest)]
    return sorted(tasks, key=lambda task: (task.begin, task.rank))


def _tasks(record: Record, shift: float, latest: float) -> Iterator[Task]:
    """The tasks of one record, with `shift` seconds added to its times."""
    ends = {event.operation: event for event in record.events if event.kind in (END, FAILED)}
    for event in record.events:
        if event.kind == BEGIN and event.details is not None:
            begin, end = event.seconds + shift, ends.get(event.operation)
            yield Task(
                record.rank, record.lane, event.name, event.details.kind, event.details.algorithm, event.runs,
                event.nbytes, begin, max(begin, end.seconds + shift if end else latest), state_of(end),
            )  # fmt: skip


def state_of(end: Event | None) -> str:
    """The state of an operation, see `Task`. end: its event `END` or `FAILED`; None if there is none."""
    return UNFINISHED if end is None else "failed" if end.kind == FAILED else ""


def links(tasks: Sequence[Task]) -> list[Link]:
    """The transfers between the tasks of a run.

    A batch goes from the rank that made its last part to the other ranks that waited for it then. A request
    goes from the worker to the server. The answer goes back if the worker's task ends after the server's.
    """
    results = [Link(make, make.end, wait, wait.end) for wait, make in last_makes(tasks)]
    requests = {(task.rank, task.line, task.number): task for task in tasks if task.kind == "request"}
    for serve in (task for task in tasks if task.kind == "serve"):
        request = requests.get((serve.detail, serve.line, serve.number))
        if request is not None and request.begin <= serve.begin:
            results.append(Link(request, request.begin, serve, serve.begin))
            if not serve.state and serve.end <= request.end:  # workers do not always wait for updates
                results.append(Link(serve, serve.end, request, request.end))
    return results


def last_makes(tasks: Sequence[Task]) -> Iterator[tuple[Task, Task]]:
    """Each wait for a batch, with the task that made the last part of the batch.

    Waits are omitted if the same rank made the last part, or if no rank did so during the wait.
    """
    last: dict[tuple[str, str, int], Task] = {}
    for task in tasks:
        key = task.shared, task.name, task.number
        if task.kind == "make" and task.shared != "-" and (key not in last or task.end > last[key].end):
            last[key] = task
    for task in tasks:
        make = last.get((task.shared, task.name, task.number)) if task.kind == "wait" else None
        if make is not None and make.rank != task.rank and task.begin < make.end <= task.end:
            yield task, make
