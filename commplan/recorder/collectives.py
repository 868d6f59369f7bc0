"""The collectives of a run on one time scale, and for which rank each of them waited.

`read_run` merges the records of the ranks and aligns the clocks of their machines (`recorder.clocks`).
`recorder.trace` and `recorder.summary` present the result.
"""

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
# The predicted seconds of collectives by phase, plan line and kind, in the order of their begin in the phase.
Predicted = Mapping[tuple[str, int, str], Sequence[float]]
_Timed = TypeVar("_Timed", "Slice", Task)


class Slice(NamedTuple):
    """A collective on one rank.

    Attributes:
        rank: The rank.
        name: Its name in the record, such as `line 7 of x.plan`, or that of a whole step.
        line: The plan line in the name; 0 if there is none.
        phase: The phase that contains it; empty if unknown.
        step: The number of the run of `phase` that contains it, from 1; 0 if unknown.
        runs: The number of its begins with this name on this rank so far, including this one.
        begin, end: In seconds on the time scale of the run. An unfinished collective ends with the last event
            of the run.
        state: `unfinished`, `failed`, or empty.
        nbytes: The bytes that it moves on this rank.
        details: The properties of the collective; None for whole steps and damaged records.
        blocked: The begin and the end of the program's wait for it, in seconds on the time scale of the run.
        holder: The rank for which this one waited: the last to begin, of those that it depends on, or the
            least rank that has not begun the collective. None if no rank began later than this one, or if the
            clocks or records do not determine it.
        waited_s: Seconds from the begin on this rank until `holder` begins, or until the end if that is
            earlier; 0 without a holder.
        margin: Seconds from the begin of the second last rank to that of `holder`, minus the uncertainty of
            their clocks; at most 0 if the holder is uncertain. If `holder` has not begun: `waited_s` if it is
            the only such rank, else 0.
        predicted: The predicted seconds; None if there is no prediction.
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
        """Seconds from the begin of `holder`, or of this rank without one, to the end."""
        return max(0.0, self.end - self.begin - self.waited_s)

    @property
    def waits_apart(self) -> bool:
        """Whether the program waited for only a part of the collective, and computed meanwhile."""
        return self.blocked != (self.begin, self.end)

    @property
    def title(self) -> str:
        """A label for traces, such as `line 7: all_reduce ring`."""
        where = f"line {self.line}" if self.line else self.name
        return f"{where}: {self.details.kind} {self.details.algorithm}" if self.details else where


class Run(NamedTuple):
    """The merged records of a run.

    Attributes:
        plan: The name of the plan.
        records: A record of each rank, in rank order: the first of `read_run`'s argument. It is that of the
            rank's collectives, if there is one and the records are ordered as by `reading.read_records`.
        collectives: The slices of each collective, at least one, in order of their earliest begin.
        clocks: The clock of each machine, in order of its first record.
        clock_collectives: The number of collectives that determine the clocks; 0 for a single machine.
        lost: The number of events that the ring buffers have dropped.
        tasks: The operations of ranks that are not collectives, in order of their begin.
    """

    plan: str
    records: tuple[Record, ...]
    collectives: tuple[tuple[Slice, ...], ...]
    clocks: tuple[Clock, ...]
    clock_collectives: int
    lost: int
    tasks: tuple[Task, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of the run, including servers."""
        return max(record.ranks for record in self.records)

    @property
    def slices(self) -> list[Slice]:
        """The slices of all collectives, in the order of `collectives`."""
        return [each for collective in self.collectives for each in collective]


def read_run(records: Sequence[Record], predicted: Predicted | None = None) -> Run:
    """Merge the records of one run, and find out for which rank each collective waited.

    Args:
        records: The records of the run, at least one, also of lanes.
        predicted: The predicted times of collectives, if there is a topology.
    """
    machines = {record.machine[:_UUID]: record for record in reversed(records)}
    order = list(dict.fromkeys(record.machine[:_UUID] for record in records))
    number = {record.rank: order.index(record.machine[:_UUID]) for record in records}
    # One clock for each machine, although its processes measured it separately.
    shifts = {record.path: machines[record.machine[:_UUID]].clock - record.clock for record in records}

    # Match the slices of the ranks, on the clocks of their machines.
    matched: dict[tuple[object, ...], list[Slice]] = {}
    of_collectives = [record for record in records if not record.lane]
    for record in of_collectives:
        for key, each in _keyed(record, _slices(record, shifts[record.path], predicted or {})):
            matched.setdefault(key, []).append(each)
    groups = list(matched.values())

    # Align the clocks of the machines.
    first = next(iter(of_collectives), records[0])
    clocks, used = _clocks(groups, number, [machines[machine].host for machine in order], first)

    def shift(record: Record) -> float:
        """Seconds to add to times of a record to get times of the run."""
        return shifts[record.path] + clocks[number[record.rank]].offset

    latest = max(
        (record.events[-1].seconds + shift(record) for record in records if record.events), default=0.0
    )
    aligned_groups = [_on_scale_of_run(group, number, clocks, latest) for group in groups]

    # Find the holder of each slice.
    ranks = {record.rank for record in of_collectives}
    collectives = [
        _with_last_ranks(_with_absent_ranks(group, ranks, first), number, clocks, first)
        for group in aligned_groups
    ]
    collectives.sort(key=lambda collective: min(each.begin for each in collective))
    by_number = {record.rank: record for record in reversed(records)}
    return Run(
        records[0].plan, tuple(by_number[rank] for rank in sorted(by_number)), tuple(collectives),
        tuple(clocks), used, sum(record.lost for record in records), tuple(tasks_of(records, shift, latest)),
    )  # fmt: skip


def _slices(record: Record, shift: float, predicted: Predicted) -> Iterator[Slice]:
    """The collectives of one rank in order of their begin, at times of the record plus `shift` seconds.

    An unfinished collective ends when it begins; `_on_scale_of_run` sets its end.
    """
    ends = {event.operation: event for event in record.events if event.kind in (END, FAILED)}
    waits = {event.operation: event for event in record.events if event.kind == WAITED}
    phase, step, counts = "", 0, dict[tuple[int, str], int]()
    for event in record.events:
        if event.kind != BEGIN:
            continue
        details, line = event.details, line_of(event.name)
        if details is None:  # a whole step
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
    """Each slice of a rank, with a key that is equal on all ranks of the same collective.

    The key has the plan line instead of the name, because the path of a plan may differ between ranks.
    """
    counts: dict[tuple[object, ...], int] = {}
    group_of = functools.cache(functools.partial(_group, record=record))
    for each in slices:
        key = (each.line or each.name, each.details, each.runs, group_of(each.details))
        counts[key] = counts.get(key, -1) + 1
        yield (*key, counts[key]), each


def _group(details: Details | None, record: Record) -> tuple[int, ...]:
    """The coordinates of a rank along all axes except those of a collective: equal on all its participants.

    Empty if the collective has no details, or the record no axes.
    """
    if details is None or not record.axes:
        return ()
    place = coordinates(record.rank, record.axes, record.axes)
    return tuple(place[axis] for axis in record.axes if axis not in details.axes)


def _members(details: Details | None, record: Record) -> int:
    """The number of ranks of a collective: of all ranks if its axes are unknown."""
    if details is None or not record.axes:
        return record.ranks
    return math.prod(record.axes.get(axis, 1) for axis in details.axes)


def _ranks(each: Slice, record: Record) -> set[int]:
    """The ranks of a collective: all ranks if its axes are unknown."""
    if each.details is None or not record.axes:
        return set(range(record.ranks))
    axes = [axis for axis in each.details.axes if axis in record.axes]
    return {*ranks_along(coordinates(each.rank, record.axes, record.axes), axes, record.axes)}


def _sources(group: list[Slice], each: Slice, record: Record) -> list[Slice]:
    """The slices of a collective that must begin before `each` can end.

    Args:
        group: The slices of the collective, in order of their begin. Returned itself if `each` needs all.
        each: A slice in `group`.
        record: A record of the run.

    Returns:
        The slices, in any order; empty if a rank has no slice, or if `each` is not the root of a collective
        towards a root.
    """
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
    """The coordinates of a rank along the axes of a collective, in the order of these axes."""
    place = coordinates(each.rank, record.axes, record.axes)
    return tuple(place.get(axis, each.rank) for axis in details.axes)


def _clocks(
    groups: Sequence[Sequence[Slice]], machine: Mapping[int, int], hosts: Sequence[str], record: Record
) -> tuple[list[Clock], int]:
    """The result of `clocks.aligned` for collectives that have ended and involve several machines.

    Args:
        groups: The slices of each collective.
        machine: The number of the machine of each rank.
        hosts: The host of each machine.
        record: A record of the run.
    """
    if len(hosts) == 1:
        return [Clock(hosts[0], 0.0, 0.0, 0.0)], 0
    constraints: list[tuple[float, Bounds]] = []
    for group in groups:
        details = group[0].details
        rooted = details is not None and details.kind in TOWARDS_SOME
        if rooted or any(each.state for each in group) or len(group) != _members(details, record):
            continue
        machines = [machine[each.rank] for each in group]
        if len(set(machines)) > 1:
            begins, ends = [each.begin for each in group], [each.end for each in group]
            constraints.append((begins[0], bounds(machines, begins, ends, len(hosts))))
    constraints.sort(key=lambda constraint: constraint[0])
    return aligned(hosts, [constraint for _, constraint in constraints])


def _on_scale_of_run(
    group: Iterable[Slice], machine: Mapping[int, int], clocks: Sequence[Clock], latest: float
) -> list[Slice]:
    """The slices on the time scale of the run, whose last event was at `latest`, when unfinished ones end."""
    shifted: list[Slice] = []
    for each in group:
        offset = clocks[machine[each.rank]].offset
        if not offset and each.state != UNFINISHED:
            shifted.append(each)
            continue
        begin, end = each.begin + offset, each.end + offset if each.state != UNFINISHED else latest
        apart = (each.blocked[0] + offset, each.blocked[1] + offset)
        blocked = apart if each.waits_apart else (begin, end)
        shifted.append(each._replace(begin=begin, end=max(begin, end), blocked=blocked))
    return shifted


def _with_absent_ranks(group: list[Slice], recorded: Set[int], record: Record) -> list[Slice]:
    """The slices of a collective. If ranks are absent, the least is the holder of slices without a good end.

    Returns `group` itself for kinds in `TOWARDS_SOME`, or if no rank is known to be absent.

    Args:
        group: The slices of the collective.
        recorded: The ranks with records. The others may have begun it.
        record: A record of the run.
    """
    details = group[0].details
    present = {each.rank for each in group}
    if _members(details, record) > len(present | recorded):  # a damaged record may have any number of ranks
        return group
    absent = _ranks(group[0], record) - present
    rooted = details is not None and details.kind in TOWARDS_SOME
    if rooted or not absent or not absent <= recorded:
        return group
    slices: list[Slice] = []
    for each in group:
        duration = each.end - each.begin
        margin = duration if len(absent) == 1 else 0.0
        waiting = each._replace(holder=min(absent), waited_s=duration, margin=margin)
        slices.append(waiting if each.state else each)
    return slices


def _with_last_ranks(
    group: Sequence[Slice], machine: Mapping[int, int], clocks: Sequence[Clock], record: Record
) -> tuple[Slice, ...]:
    """The slices of a collective. Those that depend on a later rank get the last such rank as holder.

    Unchanged if the clocks of two of its machines have not been aligned.
    """
    arrived = sorted(group, key=lambda each: each.begin)
    machines = {machine[each.rank] for each in group}
    # The offsets of two machines may be wrong in opposite directions.
    uncertainty = 2 * max(clocks[number].uncertainty for number in machines) if len(machines) > 1 else 0.0
    if math.isinf(uncertainty):
        return tuple(group)
    slices: list[Slice] = []
    for each in group:
        sources = _sources(arrived, each, record)
        late = sources if sources is arrived else sorted(sources, key=lambda other: other.begin)
        if not late or late[-1].begin <= each.begin:
            slices.append(each)
            continue
        last = late[-1]
        second_begin = max(each.begin, late[-2].begin if len(late) > 1 else each.begin)
        waited_s = min(last.begin, each.end) - each.begin
        margin = last.begin - second_begin - uncertainty
        slices.append(each._replace(holder=last.rank, waited_s=waited_s, margin=margin))
    return tuple(slices)


def by_rank(slices: Iterable[_Timed]) -> dict[int, list[_Timed]]:
    """Slices or tasks by rank, in rank order. Those of a rank are in order of their begin."""
    ordered = sorted(slices, key=lambda each: (each.rank, each.begin))
    return {rank: list(group) for rank, group in groupby(ordered, lambda each: each.rank)}
