"""Who held the others: from the records of a run's ranks, while it runs or after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from commplan.recorder.file import BEGIN, END, FAILED, GONE, ROUND, VERDICT, Event, Record, machine

_STATES = {"T": "stopped", "t": "stopped", "D": "stuck in the kernel", "Z": "dead", "X": "dead"}


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


class Rank(NamedTuple):
    """What is known of one rank. state: `alive`, `stopped`, `stuck in the kernel`, `dead`, or `unknown` of
    another machine. last: the last that it finished; waits: what it began first of all that it has not
    finished; None of either where there is none. begun: by name how often it began it. end: how it died,
    where the sidecar of its host has seen that. progress: of `waits`, where that is known."""

    rank: int
    process: int
    host: str
    state: str
    last: Event | None
    waits: Event | None
    begun: dict[str, int]
    end: str = ""
    progress: Progress | None = None


class Blame(NamedTuple):
    """holders: the ranks that hold others, with the reason. verdicts: by rank what its watchdog said.
    missing: those without a record, which ended well or have theirs elsewhere. started, seconds: since 1970,
    when the run began, and to which ages are counted."""

    plan: str
    ranks: tuple[Rank, ...]
    missing: tuple[int, ...]
    holders: dict[int, str]
    verdicts: dict[int, str]
    started: float
    seconds: float


def blame(records: Sequence[Record]) -> Blame:
    """The records of one run, at least one."""
    ranks = tuple(map(_rank, records))
    alive = any(rank.state not in ("dead", "unknown") for rank in ranks)
    latest = max((event.seconds for record in records for event in record.events), default=0.0)
    present = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(records[0].ranks) if rank not in present)
    verdicts = {
        record.rank: event.name for record in records for event in record.events if event.kind == VERDICT
    }
    when = time.time() if alive else latest
    judged = any(event.kind in (VERDICT, FAILED) for record in records for event in record.events)
    holders = _holders(ranks, judged=judged)
    return Blame(records[0].plan, ranks, missing, holders, verdicts, records[0].started, when)


def _rank(record: Record) -> Rank:
    unfinished = {event.operation: event for event in record.events if event.kind == BEGIN}
    for event in record.events:
        if event.kind == END:
            unfinished.pop(event.operation, None)
    last = next((event for event in reversed(record.events) if event.kind == END), None)
    begun: dict[str, int] = {}
    for event in (event for event in record.events if event.kind == BEGIN):
        begun[event.name] = max(begun.get(event.name, 0), event.runs)
    waits = min(unfinished.values(), default=None)
    end = next((event.name for event in record.events if event.kind == GONE), "")
    known, progress = "dead" if end else state(record), _progress(record, waits)
    return Rank(record.rank, record.process, record.host, known, last, waits, begun, end, progress)


def _progress(record: Record, waits: Event | None) -> Progress | None:
    for event in reversed(record.events):
        if waits is not None and event.kind == ROUND and event.operation == waits.operation:
            return Progress(
                event.runs >> 32, event.runs & 0xFFFFFFFF, event.nbytes >> 1, bool(event.nbytes & 1)
            )
    return None


def state(record: Record) -> str:
    """Of the process that recorded: see `Rank`."""
    return process_state(record.process) if record.machine == machine() else "unknown"


def process_state(number: int) -> str:
    """Of a process of this machine: `alive`, `stopped`, `stuck in the kernel` or `dead`."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "dead"
    return _STATES.get(fields.rpartition(")")[2].split()[0], "alive")


def _holders(ranks: Sequence[Rank], *, judged: bool) -> dict[int, str]:
    """Stopped and dead ranks that others wait for; where all are dead, those that no launcher ended, if that
    is known and they had not been told to end; else those that have not come to what others wait in, and
    wait in nothing themselves; else, where all wait, whoever is in another operation than most."""
    waiting = [rank for rank in ranks if rank.waits is not None]
    awaited = {rank.waits.name: rank.waits.runs for rank in waiting if rank.waits is not None}
    if not awaited:
        return {}
    down = {
        rank.rank: f"it {rank.end or f'is {rank.state}'}"
        for rank in ranks
        if rank.state not in ("alive", "unknown")
    }
    if len(down) < len(ranks) and down:
        return down
    died = {rank.rank: down[rank.rank] for rank in ranks if rank.end and not rank.end.startswith("was ended")}
    if died and not judged:
        return died
    late = {
        rank.rank: f"it has not come to {name}"
        for rank in ranks
        for name, runs in awaited.items()
        if rank.waits is None and rank.begun.get(name, 0) < runs
    }
    if late or len(awaited) == 1:
        return late
    names = [rank.waits.name for rank in waiting if rank.waits is not None]
    usual = max(awaited, key=names.count)
    return {
        rank.rank: f"it waits in {rank.waits.name}, most others in {usual}"
        for rank in waiting
        if rank.waits is not None and rank.waits.name != usual
    }
