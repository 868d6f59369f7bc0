"""Find the ranks that block the others, from the records of a run, during the run or afterwards.

`ranks_of` reads the progress of each rank from its records, and `states_of` translates it for
`recorder.verdict.blame`, which decides. `blame` does both for `commplan blame`, and adds the deaths of
processes and the verdicts of watchdogs that are in the records.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from commplan.ir.axes import coordinates, group
from commplan.ir.collective_kinds import TOWARDS_SOME
from commplan.recorder import verdict
from commplan.recorder.file import BEGIN, END, FAILED, GONE, ROUND, VERDICT, Call, Event, Record, machine
from commplan.recorder.processes import process_state
from commplan.recorder.rank_state import Condition, Need, RankState, Wait
from commplan.recorder.verdict import step_of

_NOUNS = {"make": "batch", "wait": "batch", "request": "request", "serve": "request"}  # by `lane.Kind`
_GONE = ("dead", "ended")  # the states of ranks without a process
ANSWER = "answer"  # the sequence in a `Need` for answers that another rank has not sent; no rank begins it
_TOGETHER_S = 0.5  # maximum seconds between deaths whose order is uncertain
_RECENT = 48  # number of last calls whose order is compared
_MISSING = 1000  # maximum length of a list of ranks: damaged records may claim any number
# The verdict of a watchdog about silent ranks, which it lists as `verdict.listed` does.
_SILENT = re.compile(
    r"(?:each of )?(?:ranks?|process(?:es)?) ([\d, -]+)(?: and \d+ more)? ((?:is st|does not answer).*)"
)


class Progress(NamedTuple):
    """The progress of an operation that has moved no data for a second.

    An event `ROUND` stores it in two numbers: `runs = round << 32 | rounds`, `nbytes = rank << 1 | sends`.

    Attributes:
        round: The current round, from 1; 0 if `rounds` is 0.
        rounds: The number of rounds; 0 if the operation has none.
        rank: The rank for which the operation waits.
        sends: Whether it waits for `rank` to receive a message, and not for a message of `rank`.
    """

    round: int
    rounds: int
    rank: int
    sends: bool

    def __str__(self) -> str:
        text = f"in round {self.round} of {self.rounds}, " if self.rounds else ""
        return f"{text}waiting for rank {self.rank}{' to take a message' if self.sends else ''}"


class Activity(NamedTuple):
    """The progress of a rank in the operations of a lane. Fields that are None have no such operation.

    Attributes:
        lane: See `Record`.
        last: The end of the operation that it last finished.
        waits: The begin of the first unfinished operation that is not a batch to make: a batch or an answer
            for which it waits, or a request that it has not answered.
        makes: The begin of the first unfinished batch that it makes.
        progress: The progress of `waits`; None if unknown.
        call: A call of the user's code that takes long.
    """

    lane: str
    last: Event | None
    waits: Event | None
    makes: Event | None = None
    progress: Progress | None = None
    call: Call | None = None


class Rank(NamedTuple):
    """The progress of one rank, from its records.

    Attributes:
        rank: The rank.
        process: The process number on `host`.
        host: The host name.
        state: `alive`, `stopped`, `stuck in the kernel`, `dead`, `ended` if it exited, or `unknown` if it is
            on another machine.
        last: The end of the collective that it last finished; None if there is none.
        waits: The begin of the first collective that has not ended, or has failed; None if there is none.
        begun: How often it began each collective, by name.
        end: How it exited, or how it died if the sidecar of its host observed that; else empty.
        progress: The progress of `waits`; None if unknown.
        activities: Its progress in the operations of each lane.
        collective: Whether it records collectives; a server does not.
        axes: The size of each mesh axis, as in its record of collectives; empty if unknown.
        recent: The number of a call of a whole step, and the names of this call and those after it; the names
            are empty if it records no whole steps.
        order: Its last collectives in order of their begin, each with its number of runs.
        gone_s: When it died, in seconds since 1970, if the sidecar of its host observed that; else 0.
    """

    rank: int
    process: int
    host: str
    state: Condition
    last: Event | None
    waits: Event | None
    begun: dict[str, int]
    end: str = ""
    progress: Progress | None = None
    activities: tuple[Activity, ...] = ()
    collective: bool = True
    axes: Mapping[str, int] = {}
    recent: tuple[int, tuple[str, ...]] = (1, ())
    order: tuple[tuple[str, int], ...] = ()
    gone_s: float = 0.0


class Blame(NamedTuple):
    """The ranks of a run that block others.

    Attributes:
        plan: The name of the plan.
        ranks: The progress of each rank that has a record, in rank order.
        missing: The first ranks without a record, see `missing_ranks`. They ended well, or their records are
            elsewhere.
        absent: The number of all ranks without a record.
        holders: The ranks that block others, each with the reason.
        verdicts: The last verdict of each rank's watchdog, by the rank that recorded it.
        started: When the record of the first rank was created, in seconds since 1970.
        seconds: The time at which the ages of operations are taken, in seconds since 1970: now if a process
            of the run lives on this machine, else the time of the last event.
    """

    plan: str
    ranks: tuple[Rank, ...]
    missing: tuple[int, ...]
    absent: int
    holders: dict[int, str]
    verdicts: dict[int, str]
    started: float
    seconds: float


def blame(records: Sequence[Record], ask: Callable[[Record], str] = lambda record: "") -> Blame:
    """Find the ranks of a run that block the others.

    Args:
        records: The records of one run, at least one.
        ask: Returns the Python stack of the main thread of the process that writes a record; "" if unknown.
            Called for blocking ranks whose process lives, with their first record.
    """
    ordered = sorted(records, key=lambda record: (record.rank, record.lane))
    ranks = ranks_of(records)
    alive = any(rank.state not in ("dead", "ended", "unknown") for rank in ranks)
    latest = max((event.seconds for record in records for event in record.events), default=0.0)
    count = max(record.ranks for record in records)
    missing = missing_ranks(count, {rank.rank for rank in ranks})
    verdicts = {
        record.rank: event.name for record in records for event in record.events if event.kind == VERDICT
    }
    when = time.time() if alive else latest
    is_judged = any(event.kind in (VERDICT, FAILED) for record in records for event in record.events)
    holders = _silenced(ranks, verdicts) or _blocking(ranks, when, is_judged=is_judged)
    first = {record.rank: record for record in reversed(ordered)}
    for rank in ranks:
        has_call = any(activity.call for activity in rank.activities)  # its stack is in the reason already
        if rank.rank in holders and rank.state == "alive" and not has_call:
            stack = ask(first[rank.rank])
            holders[rank.rank] += f"; its Python: {stack}" if stack else ""
    absent = count - len(ranks)
    return Blame(ordered[0].plan, ranks, missing, absent, holders, verdicts, ordered[0].started, when)


def ranks_of(records: Sequence[Record]) -> tuple[Rank, ...]:
    """The progress of each rank in `records`, in rank order. Reads the states of processes from `/proc`."""
    ordered = sorted(records, key=lambda record: (record.rank, record.lane))
    by_rank = groupby(ordered, lambda record: record.rank)
    return tuple(_rank(list(rank_records)) for _, rank_records in by_rank)


def missing_ranks(ranks: int, recorded: Set[int]) -> tuple[int, ...]:
    """The ranks below `ranks` that are not in `recorded`, in order: the first `_MISSING` of them."""
    return tuple(itertools.islice((rank for rank in range(ranks) if rank not in recorded), _MISSING))


def _rank(records: Sequence[Record]) -> Rank:
    """The progress of one rank from its records, of which that of its collectives, if any, is the first."""
    first = records[0]
    main = first if not first.lane else first._replace(events=())
    unfinished = _unfinished(main)
    last = next((event for event in reversed(main.events) if event.kind == END), None)
    begun: dict[str, int] = {}
    for event in (event for event in main.events if event.kind == BEGIN):
        begun[event.name] = max(begun.get(event.name, 0), event.runs)
    waits = min(unfinished, default=None)

    # An end that the program recorded itself explains more than the sidecar's observation of an exit.
    death = next((event for record in records for event in record.events if event.kind == GONE), None)
    died = death.name if death is not None else ""
    rank_state = "dead" if died else state(first)
    judged = any(event.kind == VERDICT for record in records for event in record.events)
    ended = first.ended or ("has ended, according to its watchdog" if judged else "")
    if ended and rank_state in ("dead", "unknown") and (not died or (judged and died.startswith("exited"))):
        rank_state, died = "ended", ended

    activities = tuple(_activity(record) for record in records if record.lane)
    return Rank(
        first.rank, first.process, first.host, rank_state, last, waits, begun, died,
        _progress(main, waits), activities, not first.lane, main.axes, _recent(main),
        tuple((event.name, event.runs) for event in main.events if event.kind == BEGIN)[-_RECENT:],
        death.seconds if death is not None else 0.0,
    )  # fmt: skip


def _recent(record: Record) -> tuple[int, tuple[str, ...]]:
    """The last calls of whole steps, see `Rank.recent`.

    All processes make these calls in the same order. Their names contain a backtick, unlike collectives.
    """
    calls = [event for event in record.events if event.kind == BEGIN and "`" in event.name][-_RECENT:]
    return (calls[0].operation, tuple(f"`{step_of(call.name)}`" for call in calls)) if calls else (1, ())


def _unfinished(record: Record) -> list[Event]:
    """The begins of operations that have not ended, or have failed."""
    unfinished = {event.operation: event for event in record.events if event.kind == BEGIN}
    for event in record.events:
        if event.kind == END:
            unfinished.pop(event.operation, None)
    return list(unfinished.values())


def _activity(record: Record) -> Activity:
    """The progress of a rank in the operations of a lane."""
    unfinished = _unfinished(record)
    makes = [event for event in unfinished if event.details is not None and event.details.kind == "make"]
    waits = min((event for event in unfinished if event not in makes), default=None)
    last = next((event for event in reversed(record.events) if event.kind == END), None)
    progress = _progress(record, waits)
    return Activity(record.lane, last, waits, min(makes, default=None), progress, record.call)


def _progress(record: Record, waits: Event | None) -> Progress | None:
    """The last recorded progress of the operation that begins with `waits`; None if there is none."""
    for event in reversed(record.events):
        if waits is not None and event.kind == ROUND and event.operation == waits.operation:
            return Progress(
                event.runs >> 32, event.runs & 0xFFFFFFFF, event.nbytes >> 1, bool(event.nbytes & 1)
            )
    return None


def described(event: Event) -> str:
    """The operation of an event in messages: `batch 7 of line 9`, `request 3 of line 14`, `line 6, run 2`."""
    noun = _NOUNS.get(event.details.kind) if event.details is not None else None
    return f"{noun} {event.runs} of {event.name}" if noun else f"{event.name}, run {event.runs}"


def state(record: Record) -> Condition:
    """The state of the process that writes the record; `unknown` if it is on another machine."""
    if record.machine != machine():
        return "unknown"
    age_s = time.monotonic() - (record.started - record.clock) if record.clock else 0.0
    return process_state(record.process, age_s)


def _blocking(ranks: Sequence[Rank], when: float, *, is_judged: bool) -> dict[int, str]:
    """The ranks that block others, each with its reason.

    Args:
        ranks: The progress of each rank.
        when: The time in seconds since 1970.
        is_judged: Whether a failure or a verdict is recorded. If so, and all ranks are gone, their ends are
            consequences, and are ignored.
    """
    down = {} if is_judged and all(rank.state in _GONE for rank in ranks) else _down(ranks)
    states = states_of(ranks, when, down)
    reasons = dict(verdict.blame(states).reasons)
    for rank in ranks:
        call = next((activity.call for activity in rank.activities if activity.call is not None), None)
        if rank.rank in reasons and rank.rank not in down and call is not None:
            reasons[rank.rank] += f": it is {call.sentence(when)}"
    return reasons


def states_of(
    ranks: Sequence[Rank], when: float, down: Mapping[int, str], recorded: Collection[int] = ()
) -> dict[int, RankState]:
    """The states of ranks at a time, for `verdict.blame`. Ranks that are not in `down` count as alive.

    Args:
        ranks: The progress of each rank.
        when: The time in seconds since 1970.
        down: The ranks that cannot continue, each with the reason.
        recorded: The ranks that record collectives. If empty, those among `ranks`.
    """
    recorded = recorded or dict.fromkeys(rank.rank for rank in ranks if rank.collective)
    steps = sequence_of(recorded) if any(rank.recent[1] for rank in ranks) else ""
    return {
        rank.rank: RankState(
            rank.rank,
            rank.state if rank.rank in down else "alive",
            down.get(rank.rank, ""),
            waits=tuple(_waits(rank, recorded, when)),
            begun=rank.begun | {steps: rank.recent[0] - 1 + len(rank.recent[1])},
            recent={steps: rank.recent} if rank.recent[1] else {},
            order=rank.order,
        )
        for rank in ranks
    }


def sequence_of(ranks: Iterable[int]) -> str:
    """The name of the sequence of whole steps that these ranks run together, for `Need` and `RankState`.

    It contains a checksum instead of the ranks, because the states of all ranks repeat it.
    """
    return f"steps {zlib.crc32(repr(tuple(ranks)).encode()):08x}"


def _waits(rank: Rank, recorded: Collection[int], when: float) -> Iterator[Wait]:
    """The collective in which a rank waits, then its waits in lanes. For the arguments, see `states_of`."""
    if rank.waits is not None:
        event, progress = rank.waits, rank.progress
        is_rooted = event.details is not None and event.details.kind in TOWARDS_SOME
        needed = [progress.rank] if is_rooted and progress is not None else _members(rank, event, recorded)
        if "`" in event.name:  # a whole step: its name may still be extended by lines on other ranks
            need = Need.begin(needed, sequence_of(recorded), event.operation)
        else:
            need = Need.begin(needed, event.name, event.runs)
        seconds, missing = when - event.seconds, f"reached {event.name}"
        yield Wait(event.name, seconds, (need,), missing, event.runs, str(progress or ""))
    for activity in rank.activities:
        if activity.waits is not None and activity.progress is not None:
            event = activity.waits
            needs = (Need.begin([activity.progress.rank], ANSWER, 1),)
            owed = _owed(activity, event)
            yield Wait(described(event), when - event.seconds, needs, owed, event.runs)


def _members(rank: Rank, event: Event, recorded: Collection[int]) -> Collection[int]:
    """The ranks of a collective that record collectives: all of `recorded` if its axes are unknown."""
    if event.details is None or not rank.axes:
        return recorded
    along = ranks_along(rank, [axis for axis in event.details.axes if axis in rank.axes])
    return [number for number in along if number in recorded]


def ranks_along(rank: Rank, axes: Sequence[str]) -> Sequence[int]:
    """The ranks whose coordinates differ from those of `rank` only along `axes`; `rank` is one of them."""
    place = coordinates(rank.rank, rank.axes, rank.axes) | dict.fromkeys(axes, 0)
    return _group(tuple(place.items()), tuple(axes), tuple(rank.axes.items()))


@functools.lru_cache  # the ranks of a host are in few groups
def _group(
    place: tuple[tuple[str, int], ...], axes: tuple[str, ...], sizes: tuple[tuple[str, int], ...]
) -> Sequence[int]:
    """`ir.axes.group` with arguments that can be hashed: pairs instead of mappings."""
    return group(dict(place), axes, dict(sizes))


def _owed(activity: Activity, event: Event) -> str:
    """The action that the awaited rank has not performed, see `rank_state.Wait.missing`."""
    if activity.lane == "input":
        return f"made its part of {described(event)}"
    return f"{'answered' if activity.lane == 'requests' else 'reached'} {described(event)}"


def _down(ranks: Sequence[Rank]) -> dict[int, str]:
    """The ranks that cannot continue, each with its condition, except ranks that ended while they waited.

    If all ranks are gone, only the result of `first_death`. Empty if all ranks are stopped or stuck.
    """
    down = {
        rank.rank: rank
        for rank in ranks
        if rank.state not in ("alive", "unknown") and (rank.state != "ended" or not _left_waiting(rank))
    }
    if all(rank.state in _GONE for rank in ranks):
        first = first_death(ranks)
        down = {first.rank: first} if first is not None else {}
    if len(down) == len(ranks) and not any(rank.state in _GONE for rank in ranks):
        return {}
    return {number: _how(rank) for number, rank in down.items()}


def first_death(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that died first, of those whose death the sidecar of their host observed.

    None if there is none, or if a launcher, scheduler or user ended a rank more than `_TOGETHER_S` before.
    """
    dead = sorted((rank for rank in ranks if rank.state == "dead" and rank.end), key=lambda rank: rank.gone_s)
    first = next((rank for rank in dead if not _was_ended(rank)), None)
    ended_s = next((rank.gone_s for rank in dead if _was_ended(rank)), None)
    if first is None or (ended_s is not None and ended_s < first.gone_s - _TOGETHER_S):
        return None
    return first


def _was_ended(rank: Rank) -> bool:
    """Whether a signal from outside ended the rank, such as SIGTERM, see `sidecar.ending.described`."""
    return rank.end.startswith("was ended")


def _how(rank: Rank) -> str:
    """The condition of a rank that cannot continue, for a message."""
    lives = "" if rank.state in _GONE else f": process {rank.process} on {rank.host} lives"
    if rank.state == "stopped":
        lives += f", and kill -CONT {rank.process} lets it continue"
    return f"it {rank.end}" if rank.end else f"it is {rank.state}{lives}"


def _silenced(ranks: Sequence[Rank], verdicts: Mapping[int, str]) -> dict[int, str]:
    """The ranks that watchdogs reported as silent, each with the report; empty unless all ranks are gone.

    The records of ranks that are gone do not show that they were silent.
    """
    if any(rank.state not in _GONE for rank in ranks):
        return {}
    matches = ((reporter, _SILENT.match(text)) for reporter, text in verdicts.items())
    return {
        rank: f"it {match[2]}, according to the verdict of rank {reporter}"
        for reporter, match in matches
        if match
        for part in match[1].split(", ")  # a rank, or a range such as 8-15
        for first, _, last in [part.partition("-")]
        for rank in range(int(first), int(last or first) + 1)[:_MISSING]
    }


def _left_waiting(rank: Rank) -> bool:
    """Whether an operation of the rank was unfinished at its end."""
    return rank.waits is not None or any(activity.waits is not None for activity in rank.activities)
