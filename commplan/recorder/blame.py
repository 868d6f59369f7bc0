"""Find the ranks that block the others, from the records of a run, during the run or afterwards."""

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

_NOUNS = {"make": "batch", "wait": "batch", "request": "request", "serve": "request"}
_GONE = ("dead", "ended")
ANSWER = "answer"  # a sequence for answers that another rank has not sent; no rank begins it
_TOGETHER_S = 0.5  # between deaths whose order is uncertain
_RECENT = 48  # number of calls whose order is compared
_MISSING = 1000  # maximum number of listed ranks without a record; damaged records may have any
# A watchdog's verdict, with ranks as in `verdict.listed`.
_SILENT = re.compile(
    r"(?:each of )?(?:ranks?|process(?:es)?) ([\d, -]+)(?: and \d+ more)? ((?:is st|does not answer).*)"
)


class Progress(NamedTuple):
    """The progress of an operation that has moved no data for a second.

    Attributes:
        round: The current round of `rounds`, counted from 1.
        rank: The rank whose message it waits for.
        sends: Whether it waits for `rank` to receive a message instead.
    """

    round: int
    rounds: int
    rank: int
    sends: bool

    def __str__(self) -> str:
        text = f"in round {self.round} of {self.rounds}, " if self.rounds else ""
        return f"{text}waiting for rank {self.rank}{' to take a message' if self.sends else ''}"


class Activity(NamedTuple):
    """An activity of a rank other than its collectives.

    Attributes:
        lane: See `Record`.
        last: The last operation that it finished, if any.
        waits: The first operation that it waits for, or request that it has not answered, if any.
        makes: The first batch that it has begun and not made, if any.
        progress: The progress of `waits`.
        call: A call of the user's code that takes long, if any.
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
        state: `alive`, `stopped`, `stuck in the kernel`, `dead`, `ended` if it exited, or `unknown` if it is
            on another machine.
        last: The last collective that it finished, if any.
        waits: The first collective that it has begun and not finished, if any.
        begun: How often it began each collective, by name.
        end: How it exited, or how it died if the sidecar of its host observed that; else empty.
        progress: The progress of `waits`, if known.
        activities: Its other activities.
        collective: Whether it records collectives; a server does not.
        axes: The axes of its record.
        recent: Its last calls of whole steps, see `verdict.RankState`.
        order: Its last collectives, see `verdict.RankState`.
        gone_s: When it died.
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
        missing: The first ranks without a record. They ended well, or their records are elsewhere.
        absent: The number of ranks without a record.
        holders: The ranks that block others, with the reasons.
        verdicts: The verdicts of watchdogs, by rank.
        started: When the run began, in seconds since 1970.
        seconds: The time at which the ages of operations are taken, in seconds since 1970.
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
        records: the records of one run, at least one.
        ask: returns the Python stack of the main thread of a live process; "" if unknown.

    Returns:
        The progress of all ranks, and the ranks that block others with the reasons.
    """
    ordered = sorted(records, key=lambda record: (record.rank, record.lane))
    ranks = ranks_of(records)
    alive = any(rank.state not in ("dead", "ended", "unknown") for rank in ranks)
    latest = max((event.seconds for record in records for event in record.events), default=0.0)
    many = max(record.ranks for record in records)
    missing = missing_ranks(many, {rank.rank for rank in ranks})
    verdicts = {
        record.rank: event.name for record in records for event in record.events if event.kind == VERDICT
    }
    when = time.time() if alive else latest
    is_judged = any(event.kind in (VERDICT, FAILED) for record in records for event in record.events)
    holders = _silenced(ranks, verdicts) or _blocking(ranks, when, is_judged=is_judged)
    first = {record.rank: record for record in reversed(ordered)}
    for rank in ranks:
        if rank.rank in holders and rank.state == "alive" and not any(act.call for act in rank.activities):
            stack = ask(first[rank.rank])
            holders[rank.rank] += f"; its Python: {stack}" if stack else ""
    absent = many - len(ranks)
    return Blame(ordered[0].plan, ranks, missing, absent, holders, verdicts, ordered[0].started, when)


def ranks_of(records: Sequence[Record]) -> tuple[Rank, ...]:
    """The progress of each rank, in rank order, from the records."""
    ordered = sorted(records, key=lambda record: (record.rank, record.lane))
    return tuple(_rank(list(group)) for _, group in groupby(ordered, lambda record: record.rank))


def missing_ranks(ranks: int, recorded: Set[int]) -> tuple[int, ...]:
    """The first of the ranks without a record, in order: at most `_MISSING`."""
    return tuple(itertools.islice((rank for rank in range(ranks) if rank not in recorded), _MISSING))


def _rank(records: Sequence[Record]) -> Rank:
    """The progress of one rank. Its record of collectives, if any, is the first of `records`."""
    first = records[0]
    main = first if not first.lane else first._replace(events=())
    unfinished = _unfinished(main)
    last = next((event for event in reversed(main.events) if event.kind == END), None)
    begun: dict[str, int] = {}
    for event in (event for event in main.events if event.kind == BEGIN):
        begun[event.name] = max(begun.get(event.name, 0), event.runs)
    waits = min(unfinished, default=None)
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
    """The last calls of whole steps, which all processes make in the same order. Collectives are excluded."""
    calls = [event for event in record.events if event.kind == BEGIN and "`" in event.name][-_RECENT:]
    return (calls[0].operation, tuple(f"`{step_of(call.name)}`" for call in calls)) if calls else (1, ())


def _unfinished(record: Record) -> list[Event]:
    """The operations that have begun, and have not ended or have failed."""
    unfinished = {event.operation: event for event in record.events if event.kind == BEGIN}
    for event in record.events:
        if event.kind == END:
            unfinished.pop(event.operation, None)
    return list(unfinished.values())


def _activity(record: Record) -> Activity:
    unfinished = _unfinished(record)
    makes = [event for event in unfinished if event.details is not None and event.details.kind == "make"]
    waits = min((event for event in unfinished if event not in makes), default=None)
    last = next((event for event in reversed(record.events) if event.kind == END), None)
    progress = _progress(record, waits)
    return Activity(record.lane, last, waits, min(makes, default=None), progress, record.call)


def _progress(record: Record, waits: Event | None) -> Progress | None:
    for event in reversed(record.events):
        if waits is not None and event.kind == ROUND and event.operation == waits.operation:
            return Progress(
                event.runs >> 32, event.runs & 0xFFFFFFFF, event.nbytes >> 1, bool(event.nbytes & 1)
            )
    return None


def described(event: Event) -> str:
    """`batch 7 of line 9`, `request 3 of line 14`, `line 6, run 2`."""
    noun = _NOUNS.get(event.details.kind) if event.details is not None else None
    return f"{noun} {event.runs} of {event.name}" if noun else f"{event.name}, run {event.runs}"


def state(record: Record) -> Condition:
    """The state of the process that writes the record, see `Rank`."""
    if record.machine != machine():
        return "unknown"
    age_s = time.monotonic() - (record.started - record.clock) if record.clock else 0.0
    return process_state(record.process, age_s)


def _blocking(ranks: Sequence[Rank], when: float, *, is_judged: bool) -> dict[int, str]:
    """The ranks that block others, each with its reason."""
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
    """The states of ranks at a time, for `verdict.blame`.

    Args:
        ranks: The progress of each rank.
        when: The time in seconds since 1970.
        down: The ranks that cannot continue, each with the reason.
        recorded: The ranks that record collectives, by default those among `ranks`.
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
    """The name of the sequence of whole steps that these ranks run together. States repeat it."""
    return f"steps {zlib.crc32(repr(tuple(ranks)).encode()):08x}"


def _waits(rank: Rank, recorded: Collection[int], when: float) -> Iterator[Wait]:
    """The collective that a rank waits in, and its other waits. `recorded` is as in `states_of`."""
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
    """The ranks of a collective that have recorded their collectives."""
    if event.details is None or not rank.axes:
        return recorded
    along = ranks_along(rank, [axis for axis in event.details.axes if axis in rank.axes])
    return [number for number in along if number in recorded]


def ranks_along(rank: Rank, axes: Sequence[str]) -> Sequence[int]:
    """The ranks that differ from `rank` only along `axes` of the record."""
    place = coordinates(rank.rank, rank.axes, rank.axes) | dict.fromkeys(axes, 0)
    return _group(tuple(place.items()), tuple(axes), tuple(rank.axes.items()))


@functools.lru_cache  # ranks of a host are in few groups
def _group(
    place: tuple[tuple[str, int], ...], axes: tuple[str, ...], sizes: tuple[tuple[str, int], ...]
) -> Sequence[int]:
    return group(dict(place), axes, dict(sizes))


def _owed(activity: Activity, event: Event) -> str:
    """The missing action of the awaited rank."""
    if activity.lane == "input":
        return f"made its part of {described(event)}"
    return f"{'answered' if activity.lane == 'requests' else 'reached'} {described(event)}"


def _down(ranks: Sequence[Rank]) -> dict[int, str]:
    """The ranks that cannot continue, and their condition. Ranks that ended while they waited are excluded.

    If all ranks are gone, returns the first that died, unless a launcher had begun to end them.
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
        return {}  # all are stopped
    return {number: _how(rank) for number, rank in down.items()}


def first_death(ranks: Sequence[Rank]) -> Rank | None:
    """The first rank that died; None if a launcher, a scheduler or a user ended ranks before."""
    ends = sorted((rank for rank in ranks if rank.state == "dead" and rank.end), key=lambda rank: rank.gone_s)
    first = next((rank for rank in ends if not _was_ended(rank)), None)
    outside = next((rank.gone_s for rank in ends if _was_ended(rank)), None)
    if first is None or (outside is not None and outside < first.gone_s - _TOGETHER_S):
        return None
    return first


def _was_ended(rank: Rank) -> bool:
    return rank.end.startswith("was ended")


def _how(rank: Rank) -> str:
    """The condition of a rank that cannot continue."""
    lives = "" if rank.state in _GONE else f": process {rank.process} on {rank.host} lives"
    if rank.state == "stopped":
        lives += f", and kill -CONT {rank.process} lets it continue"
    return f"it {rank.end}" if rank.end else f"it is {rank.state}{lives}"


def _silenced(ranks: Sequence[Rank], verdicts: Mapping[int, str]) -> dict[int, str]:
    """The ranks that watchdogs reported as silent, if all have ended: records do not show their state."""
    if any(rank.state not in _GONE for rank in ranks):
        return {}
    matches = ((teller, _SILENT.match(text)) for teller, text in verdicts.items())
    return {
        rank: f"it {m[2]}, according to the verdict of rank {teller}"
        for teller, m in matches
        if m
        for part in m[1].split(", ")
        for first, _, last in [part.partition("-")]
        for rank in range(int(first), int(last or first) + 1)[:_MISSING]
    }


def _left_waiting(rank: Rank) -> bool:
    return rank.waits is not None or any(activity.waits is not None for activity in rank.activities)
