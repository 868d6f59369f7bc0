"""The collectives of a run, from the records of its ranks on one time scale, and which ranks waited."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple, TypeVar

from commplan.ir.axes import coordinates
from commplan.ir.axes import group as ranks_along
from commplan.ir.collective_kinds import FROM_ROOT, TOWARDS_SOME
from commplan.recorder.clocks import Bounds, Clock, aligned, bounds
from commplan.recorder.file import BEGIN, END, FAILED, WAITED, Details, Record
from commplan.recorder.tasks import UNFINISHED, Task, line_of, state_of, tasks_of

_UUID = 36  # characters of the machine's boot id, which all of its processes share
# Seconds of the collectives of a phase, in its order, by phase, plan line and kind.
Predicted = Mapping[tuple[str, int, str], Sequence[float]]
_Timed = TypeVar("_Timed", "Slice", Task)


class Slice(NamedTuple):
    """A collective on one rank.

    Attributes:
        step: The number of the run of `phase` that contains it; 0 if unknown.
        begin, end: In seconds on the time scale of the run.
        state: `unfinished`, `failed`, or empty.
        nbytes: The bytes that it moves on this rank.
        blocked: The begin and the end of the program's wait for it.
        holder: The rank that began last, of those that it depends on, if that was later than on this rank; or
            a rank that has not begun it.
        waited_s: Seconds from the begin on this rank until `holder` begins, or until its end.
        margin: Seconds from the begin of the last other rank to that of `holder`, minus the uncertainty of
            their clocks. Equals `waited_s` if only `holder` has not begun.
        predicted: The predicted seconds, if there is a prediction.
    """

    rank: int
    name: str
    line: int
    phase: str
    step: int
    runs: int
    begin: float
    end: float
    state: str
    nbytes: int
    details: Details | None
    blocked: tuple[float, float]
    holder: int | None = None
    waited_s: float = 0.0
    margin: float = 0.0
    predicted: float | None = None

    @property
    def transfer(self) -> float:
        """Seconds from the time when all ranks have begun to the end."""
        return max(0.0, self.end - self.begin - self.waited_s)

    @property
    def waits_apart(self) -> bool:
        """Whether the program computed during a part of the collective instead of waiting for it."""
        return self.blocked != (self.begin, self.end)

    @property
    def title(self) -> str:
        """`line 7: all_reduce ring`."""
        where = f"line {self.line}" if self.line else self.name
        return f"{where}: {self.details.kind} {self.details.algorithm}" if self.details else where


class Run(NamedTuple):
    """The merged records of a run.

    Attributes:
        records: The first record of each rank: that of its collectives, if it has any.
        collectives: The slices of each collective, in order of their begin.
        clocks: The clocks of its machines.
        synchronised: The number of collectives that determine the clocks.
        lost: The number of events that the ring buffers have dropped.
        tasks: The operations of ranks that are not collectives.
    """

    plan: str
    records: tuple[Record, ...]
    collectives: tuple[tuple[Slice, ...], ...]
    clocks: tuple[Clock, ...]
    synchronised: int
    lost: int
    tasks: tuple[Task, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of the run, including servers."""
        return max(record.ranks for record in self.records)

    @property
    def slices(self) -> list[Slice]:
        return [each for collective in self.collectives for each in collective]


def read_run(records: Sequence[Record], predicted: Predicted | None = None) -> Run:
    """Merge the records of one run, at least one."""
    machines = {record.machine[:_UUID]: record for record in reversed(records)}
    order = list(dict.fromkeys(record.machine[:_UUID] for record in records))
    number = {record.rank: order.index(record.machine[:_UUID]) for record in records}
    matched: dict[tuple[object, ...], list[Slice]] = {}
    # One clock for each machine, although its processes measured it separately.
    shifts = {record.path: machines[record.machine[:_UUID]].clock - record.clock for record in records}
    collective = [record for record in records if not record.lane]
    for record in collective:
        for key, each in _keyed(record, _slices(record, shifts[record.path], predicted or {})):
            matched.setdefault(key, []).append(each)
    groups = list(matched.values())
    first = next(iter(collective), records[0])
    clocks, used = _clocks(groups, number, [machines[machine].host for machine in order], first)

    def shift(record: Record) -> float:
        return shifts[record.path] + clocks[number[record.rank]].offset

    latest = max(
        (record.events[-1].seconds + shift(record) for record in records if record.events), default=0.0
    )
    moved = [_moved(group, number, clocks, latest) for group in groups]
    ranks = {record.rank for record in collective}
    collectives = [_judged(_held(group, ranks, first), number, clocks, first) for group in moved]
    collectives.sort(key=lambda collective: min(each.begin for each in collective))
    first_of = {record.rank: record for record in reversed(records)}
    return Run(
        records[0].plan, tuple(first_of[rank] for rank in sorted(first_of)), tuple(collectives),
        tuple(clocks), used, sum(record.lost for record in records), tuple(tasks_of(records, shift, latest)),
    )  # fmt: skip


def _slices(record: Record, shift: float, predicted: Predicted) -> Iterator[Slice]:
    """The collectives of one rank, in order."""
    ends = {event.operation: event for event in record.events if event.kind in (END, FAILED)}
    waits = {event.operation: event for event in record.events if event.kind == WAITED}
    phase, step, counts = "", 0, dict[tuple[int, str], int]()
    for event in record.events:
        if event.kind != BEGIN:
            continue
        details, line = event.details, line_of(event.name)
        if details is None:
            step = event.runs
        elif details.opens:
            phase, step, counts = details.opens, event.runs, {}
        end, kind = ends.get(event.operation), details.kind if details else ""
        until = max(event.seconds, end.seconds) if end else event.seconds
        place = counts[line, kind] = counts.get((line, kind), -1) + 1
        predictions = predicted.get((phase, line, kind), ())
        prediction = predictions[place] if place < len(predictions) else None
        wait = waits.get(event.operation)
        blocked = (event.seconds, until) if wait is None else (wait.seconds - wait.nbytes / 1e9, wait.seconds)
        yield Slice(
            record.rank, event.name, line, phase, step, event.runs, event.seconds + shift, until + shift,
            state_of(end), event.nbytes, details, (blocked[0] + shift, blocked[1] + shift),
            predicted=prediction,
        )  # fmt: skip


def _keyed(record: Record, slices: Iterable[Slice]) -> Iterator[tuple[tuple[object, ...], Slice]]:
    """Each slice with a key that is the same on all ranks of its collective, though paths of plans differ."""
    same: dict[tuple[object, ...], int] = {}
    group = functools.cache(functools.partial(_group, record=record))
    for each in slices:
        name = (each.line or each.name, each.details, each.runs, group(each.details))
        same[name] = same.get(name, -1) + 1
        yield (*name, same[name]), each


def _group(details: Details | None, record: Record) -> tuple[int, ...]:
    """The coordinates of a rank on the other axes than those of a collective: equal on all participants."""
    if details is None or not record.axes:
        return ()
    place = coordinates(record.rank, record.axes, record.axes)
    return tuple(place[axis] for axis in record.axes if axis not in details.axes)


def _members(details: Details | None, record: Record) -> int:
    """The number of ranks of a collective."""
    if details is None or not record.axes:
        return record.ranks
    return math.prod(record.axes.get(axis, 1) for axis in details.axes)


def _ranks(each: Slice, record: Record) -> set[int]:
    """The ranks of a collective."""
    if each.details is None or not record.axes:
        return set(range(record.ranks))
    axes = [axis for axis in each.details.axes if axis in record.axes]
    return {*ranks_along(coordinates(each.rank, record.axes, record.axes), axes, record.axes)}


def _sources(group: list[Slice], each: Slice, record: Record) -> list[Slice]:
    """The slices that must begin before `each` can end; empty if the record of a rank is missing."""
    details = each.details
    if len(group) != _members(details, record):
        return []
    if details is None or details.kind not in TOWARDS_SOME:
        return group
    ordered = sorted(group, key=lambda other: _along(other, details, record))
    at = next(index for index, other in enumerate(ordered) if other.rank == each.rank)
    if details.kind == "shift":
        return [ordered[(at - details.root) % len(ordered)]]
    if details.kind in FROM_ROOT:
        return [ordered[details.root % len(ordered)]]
    return ordered if at == details.root else []


def _along(each: Slice, details: Details, record: Record) -> tuple[int, ...]:
    """The coordinates of a rank along the axes of a collective, in their order."""
    place = coordinates(each.rank, record.axes, record.axes)
    return tuple(place.get(axis, each.rank) for axis in details.axes)


def _clocks(
    groups: Sequence[Sequence[Slice]], machine: Mapping[int, int], hosts: Sequence[str], record: Record
) -> tuple[list[Clock], int]:
    if len(hosts) == 1:
        return [Clock(hosts[0], 0.0, 0.0, 0.0)], 0
    constraints: list[tuple[float, Bounds]] = []
    for group in groups:
        details = group[0].details
        rooted = details is not None and details.kind in TOWARDS_SOME
        if rooted or any(each.state for each in group) or len(group) != _members(details, record):
            continue
        ranks = [machine[each.rank] for each in group]
        if len(set(ranks)) > 1:
            begins, ends = [each.begin for each in group], [each.end for each in group]
            constraints.append((begins[0], bounds(ranks, begins, ends, len(hosts))))
    constraints.sort(key=lambda constraint: constraint[0])
    return aligned(hosts, [constraint for _, constraint in constraints])


def _moved(
    group: Iterable[Slice], machine: Mapping[int, int], clocks: Sequence[Clock], latest: float
) -> list[Slice]:
    """The slices on the time scale of the run, whose last event was at `latest`."""
    moved: list[Slice] = []
    for each in group:
        offset = clocks[machine[each.rank]].offset
        if not offset and each.state != UNFINISHED:
            moved.append(each)
            continue
        begin, end = each.begin + offset, each.end + offset if each.state != UNFINISHED else latest
        apart = (each.blocked[0] + offset, each.blocked[1] + offset)
        blocked = apart if each.waits_apart else (begin, end)
        moved.append(each._replace(begin=begin, end=max(begin, end), blocked=blocked))
    return moved


def _held(group: list[Slice], recorded: Set[int], record: Record) -> list[Slice]:
    """The slices of a collective. An unfinished one without a root waits for ranks that have not begun it.

    recorded: The ranks with records. The others may have begun it.
    """
    details = group[0].details
    present = {each.rank for each in group}
    if _members(details, record) > len(present | recorded):  # a damaged record may have any number of ranks
        return group
    absent = _ranks(group[0], record) - present
    rooted = details is not None and details.kind in TOWARDS_SOME
    if rooted or not absent or not absent <= recorded:
        return group
    late: list[Slice] = []
    for each in group:
        duration = each.end - each.begin
        margin = duration if len(absent) == 1 else 0.0
        waiting = each._replace(holder=min(absent), waited_s=duration, margin=margin)
        late.append(waiting if each.state else each)
    return late


def _judged(
    group: Sequence[Slice], machine: Mapping[int, int], clocks: Sequence[Clock], record: Record
) -> tuple[Slice, ...]:
    arrived = sorted(group, key=lambda each: each.begin)
    machines = {machine[each.rank] for each in group}
    unsure = 2 * max(clocks[number].uncertainty for number in machines) if len(machines) > 1 else 0.0
    if math.isinf(unsure):
        return tuple(group)
    judged: list[Slice] = []
    for each in group:
        sources = _sources(arrived, each, record)
        late = sources if sources is arrived else sorted(sources, key=lambda other: other.begin)
        if not late or late[-1].begin <= each.begin:
            judged.append(each)
            continue
        holder, second = late[-1], max(each.begin, late[-2].begin if len(late) > 1 else each.begin)
        waited_s = min(holder.begin, each.end) - each.begin
        margin = holder.begin - second - unsure
        judged.append(each._replace(holder=holder.rank, waited_s=waited_s, margin=margin))
    return tuple(judged)


def by_rank(slices: Iterable[_Timed]) -> dict[int, list[_Timed]]:
    """Slices or tasks by rank, each in order of their begin."""
    ordered = sorted(slices, key=lambda each: (each.rank, each.begin))
    return {rank: list(group) for rank, group in groupby(ordered, lambda each: each.rank)}
