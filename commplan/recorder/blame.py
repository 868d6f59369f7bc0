"""Who held the others: from the records of a run's ranks, while it runs or after."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from commplan.recorder.file import BEGIN, END, FAILED, GONE, ROUND, VERDICT, Call, Event, Record, machine
from commplan.recorder.processes import process_state

_NOUNS = {"make": "batch", "wait": "batch", "request": "request", "serve": "request"}
_GONE = ("dead", "ended")
_MISSING = 1000  # ranks without a record that are named: a damaged record may tell of any number of ranks
_SILENT = re.compile(r"(?:rank|process) (\d+) ((?:is st|does not answer).*)")  # a watchdog's verdict


class Progress(NamedTuple):
    """How far an operation is in which nothing has moved for a second: in `round` of `rounds`, counted from
    1, it waits for a message of `rank`, or `sends`: for it to take one."""

    round: int
    rounds: int
    rank: int
    sends: bool

    def __str__(self) -> str:
        text = f"in round {self.round} of {self.rounds}, " if self.rounds else ""
        return f"{text}waiting for rank {self.rank}{' to take a message' if self.sends else ''}"


class Activity(NamedTuple):
    """What a rank does beside its collectives. lane: see `Record`. last: the last that it finished; waits:
    the first of all that it waits for, or has been asked and not answered; makes: the first batch that it has
    begun and not made; None of each where there is none. progress: of `waits`. call: that takes long."""

    lane: str
    last: Event | None
    waits: Event | None
    makes: Event | None = None
    progress: Progress | None = None
    call: Call | None = None


class Rank(NamedTuple):
    """What is known of one rank. state: `alive`, `stopped`, `stuck in the kernel`, `dead`, `ended` where it
    left by itself, or `unknown` of another machine. last: the last collective that it finished; waits: what
    it began first of all that it has not finished; None of either where there is none. begun: by name how
    often it began it. end: how it died, where the sidecar of its host has seen that, or how it left.
    progress: of `waits`, where that is known. activities: what else it does. collective: whether it records
    collectives; a server does not."""

    rank: int
    process: int
    host: str
    state: str
    last: Event | None
    waits: Event | None
    begun: dict[str, int]
    end: str = ""
    progress: Progress | None = None
    activities: tuple[Activity, ...] = ()
    collective: bool = True


class Blame(NamedTuple):
    """holders: the ranks that hold others, with the reason. verdicts: by rank what its watchdog said.
    missing: the first of those without a record, which ended well or have theirs elsewhere; absent: how many
    there are. started, seconds: since 1970,
    when the run began, and to which ages are counted."""

    plan: str
    ranks: tuple[Rank, ...]
    missing: tuple[int, ...]
    absent: int
    holders: dict[int, str]
    verdicts: dict[int, str]
    started: float
    seconds: float


def blame(records: Sequence[Record], ask: Callable[[Record], str] = lambda record: "") -> Blame:
    """The records of one run, at least one. ask: what the main thread of a process does that lives and holds
    others, of which its record does not say why; empty where that is not known."""
    ordered = sorted(records, key=lambda record: (record.rank, record.lane))
    ranks = tuple(_rank(list(own)) for _, own in groupby(ordered, lambda record: record.rank))
    alive = any(rank.state not in ("dead", "ended", "unknown") for rank in ranks)
    latest = max((event.seconds for record in records for event in record.events), default=0.0)
    many = max(record.ranks for record in records)
    missing = missing_ranks(many, {rank.rank for rank in ranks})
    verdicts = {
        record.rank: event.name for record in records for event in record.events if event.kind == VERDICT
    }
    when = time.time() if alive else latest
    judged = any(event.kind in (VERDICT, FAILED) for record in records for event in record.events)
    holders = _silenced(ranks, verdicts) or _followed(_holders(ranks, judged=judged), ranks, when)
    first = {record.rank: record for record in reversed(ordered)}
    for rank in ranks:
        if rank.rank in holders and rank.state == "alive" and not any(act.call for act in rank.activities):
            stack = ask(first[rank.rank])
            holders[rank.rank] += f"; its Python: {stack}" if stack else ""
    absent = many - len(ranks)
    return Blame(ordered[0].plan, ranks, missing, absent, holders, verdicts, ordered[0].started, when)


def missing_ranks(ranks: int, recorded: Set[int]) -> tuple[int, ...]:
    """The first of the ranks without a record, in order: at most `_MISSING`."""
    return tuple(itertools.islice((rank for rank in range(ranks) if rank not in recorded), _MISSING))


def _rank(records: Sequence[Record]) -> Rank:
    """records: of one rank, its collectives first if it has any."""
    first = records[0]
    main = first if not first.lane else first._replace(events=())
    unfinished = _unfinished(main)
    last = next((event for event in reversed(main.events) if event.kind == END), None)
    begun: dict[str, int] = {}
    for event in (event for event in main.events if event.kind == BEGIN):
        begun[event.name] = max(begun.get(event.name, 0), event.runs)
    waits = min(unfinished, default=None)
    died = next((e.name for record in records for e in record.events if e.kind == GONE), "")
    known = "dead" if died else state(first)
    judged = any(event.kind == VERDICT for record in records for event in record.events)
    ended = first.ended or ("has ended, as its watchdog said" if judged else "")
    if ended and known in ("dead", "unknown") and (not died or (judged and died.startswith("exited"))):
        known, died = "ended", ended
    activities = tuple(_activity(record) for record in records if record.lane)
    return Rank(
        first.rank, first.process, first.host, known, last, waits, begun, died,
        _progress(main, waits), activities, not first.lane,
    )  # fmt: skip


def _unfinished(record: Record) -> list[Event]:
    """What has begun and not ended well."""
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


def state(record: Record) -> str:
    """Of the process that recorded: see `Rank`."""
    return process_state(record.process) if record.machine == machine() else "unknown"


def _followed(holders: Mapping[int, str], ranks: Sequence[Rank], when: float) -> dict[int, str]:
    """The holders, of ranks in collectives, and those that ranks wait for beside them. Who holds others
    because it waits itself for another one, for its part of a batch or its answer, does so for no fault of
    its own: that one is named, and so on."""
    known = {rank.rank: rank for rank in ranks}
    down = _down(ranks)
    followed: dict[int, str] = {}
    for rank in ranks:
        if rank.rank in holders or _awaited(rank, known) is not None:
            end, why = _end(rank, holders.get(rank.rank, ""), known, down)
            call = next((activity.call for activity in end.activities if activity.call is not None), None)
            if call is not None and end.rank not in down:
                why = f"{why}: it is {call.sentence(when)}"
            if why:
                followed.setdefault(end.rank, why)
    return followed


def _down(ranks: Sequence[Rank]) -> dict[int, str]:
    """The ranks that can do nothing, and how they are, but for those that left waiting; where all are gone,
    not those that a launcher ended, either."""
    gone = {
        rank.rank: rank
        for rank in ranks
        if rank.state not in ("alive", "unknown") and (rank.state != "ended" or not _left_waiting(rank))
    }
    if all(rank.state in _GONE for rank in ranks):
        gone = {
            number: rank for number, rank in gone.items() if rank.end and not rank.end.startswith("was ended")
        }
    if len(gone) == len(ranks) and not any(rank.state in _GONE for rank in ranks):
        return {}  # somebody has stopped them all
    return {number: _how(rank) for number, rank in gone.items()}


def _how(rank: Rank) -> str:
    """How a rank is that can do nothing."""
    lives = "" if rank.state in _GONE else f": process {rank.process} on {rank.host} lives"
    if rank.state == "stopped":
        lives += f", and kill -CONT {rank.process} lets it go on"
    return f"it {rank.end}" if rank.end else f"it is {rank.state}{lives}"


def _silenced(ranks: Sequence[Rank], verdicts: Mapping[int, str]) -> dict[int, str]:
    """The ranks that watchdogs called silent, where all have gone since: nothing else tells how they were."""
    if any(rank.state not in _GONE for rank in ranks):
        return {}
    matches = ((teller, _SILENT.match(text)) for teller, text in verdicts.items())
    return {int(m[1]): f"it {m[2]}, said the watchdog of rank {teller}" for teller, m in matches if m}


def _left_waiting(rank: Rank) -> bool:
    return rank.waits is not None or any(activity.waits is not None for activity in rank.activities)


def _end(rank: Rank, reason: str, known: Mapping[int, Rank], down: Mapping[int, str]) -> tuple[Rank, str]:
    """The last of those that wait each for the next one, from `rank` on, and why that one holds them."""
    seen = {rank.rank}
    while rank.rank not in down and (link := _awaited(rank, known)) is not None:
        activity, rank = link
        reason = down.get(rank.rank) or _owed(activity)
        if rank.rank in seen:
            break
        seen.add(rank.rank)
    return rank, reason


def _awaited(rank: Rank, known: Mapping[int, Rank]) -> tuple[Activity, Rank] | None:
    """What it does in which it waits for another rank, and that one."""
    for activity in rank.activities:
        progress = activity.progress
        if progress is not None and progress.rank in known and progress.rank != rank.rank:
            return activity, known[progress.rank]
    return None


def _owed(activity: Activity) -> str:
    """What the one that is waited for has not done."""
    waits = activity.waits
    if waits is None:
        return "it is waited for"
    if activity.lane == "input":
        return f"it has not made its part of {described(waits)}"
    if activity.lane == "requests":
        return f"it has not answered {described(waits)}"
    return f"it has not come to {waits.name}"


def _holders(ranks: Sequence[Rank], *, judged: bool) -> dict[int, str]:
    """Stopped and dead ranks that others wait for; where all are dead, those that no launcher ended, if that
    is known and they had not been told to end; else those that have not come to what others wait in, and
    wait in nothing themselves; else, where all wait, whoever is in an earlier run than others, or in another
    operation than most."""
    waiting = [rank for rank in ranks if rank.waits is not None]
    awaited: dict[str, int] = {}
    for event in (rank.waits for rank in waiting if rank.waits is not None):
        awaited[event.name] = max(awaited.get(event.name, 0), event.runs)
    if not awaited:
        return {}
    down = _down(ranks)
    if down and not (judged and all(rank.state in _GONE for rank in ranks)):
        return down
    late = {
        rank.rank: f"it has not come to {name}"
        for rank in ranks
        for name, runs in awaited.items()
        if rank.waits is None and rank.begun.get(name, 0) < runs
    }
    if late or len(awaited) == 1:
        return late or {
            rank.rank: f"it is still in {rank.waits.name}, run {rank.waits.runs}"
            for rank in waiting
            if rank.waits is not None and rank.waits.runs < awaited[rank.waits.name]
        }
    names = [rank.waits.name for rank in waiting if rank.waits is not None]
    usual = max(awaited, key=names.count)
    return {
        rank.rank: f"it waits in {rank.waits.name}, most others in {usual}"
        for rank in waiting
        if rank.waits is not None and rank.waits.name != usual
    }
