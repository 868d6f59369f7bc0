"""What is said of a job whose processes have all gone, from their records and how each ended."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.recorder.blame import Rank, blame, described
from commplan.recorder.file import FAILED, VERDICT, Record, append_end, read_records
from commplan.sidecar import ending

_SHOWN = 4  # ends beside the first
_TOGETHER_S = 0.5  # between ends of which it cannot be said which came first


class Ended(NamedTuple):
    """A process that ended without a word. status: see `ending.status`. seconds: when, from any start.
    records: what it recorded into."""

    process: int
    who: str
    status: int | None
    seconds: float
    records: tuple[Path, ...]


def note(records: Sequence[Path], text: str) -> None:
    """Put into the records of a process that has died how it did."""
    for path in records:
        with contextlib.suppress(OSError, ValueError):
            append_end(path, text)


def judgement(ends: Sequence[Ended], killed: int) -> str:
    """The error that says which of `ends` came first and how; empty where a launcher, a scheduler or a user
    ended them all, or where a rank has recorded why the job failed.

    killed: how many processes the kernel has killed meanwhile for want of memory.
    """
    first, *others = sorted(ends, key=lambda end: (ending.from_outside(end.status), end.seconds))
    outside = [end.seconds for end in ends if ending.from_outside(end.status)]
    if ending.from_outside(first.status) or (outside and min(outside) < first.seconds - _TOGETHER_S):
        return ""
    records = [record for end in ends for record in _readable(end.records)]
    if any(event.kind in (VERDICT, FAILED) for record in records for event in record.events):
        return ""
    ranks = {rank.process: rank for rank in (blame(records).ranks if records else ())}
    text, *notes = [_said(end, ranks.get(end.process)) for end in (first, *others[:_SHOWN])]
    if records and max(record.ranks for record in records) > len(ranks):
        notes.append("of ranks on other hosts, which may have ended before, nothing is known here")
    if killed:
        notes.append(f"meanwhile the kernel has killed {killed} for want of memory")
    notes.append("said by the sidecar of this host, since no process of the job is left there")
    return f"{CommplanError(Diagnostic('CP0834', text, None, tuple(map(Note, notes))))}\n"


def _said(end: Ended, rank: Rank | None) -> str:
    host, where = (f" on {rank.host}", _where(rank)) if rank else ("", "")
    return f"{end.who} (process {end.process}{host}) {ending.described(end.status)}{where}"


def _readable(paths: Sequence[Path]) -> list[Record]:
    records: list[Record] = []
    for path in paths[:1]:  # of the job's first communicator or mesh, and what else the rank did
        own = ".".join(path.name.split(".")[:2])
        for lane in path.parent.glob(f"{own}.*rec"):
            with contextlib.suppress(CommplanError):
                records += read_records([str(lane)])
    return records


def _where(rank: Rank) -> str:
    if rank.waits:
        return f" in {described(rank.waits)}"
    text = f", in no collective; it last finished {described(rank.last)}" if rank.last else ""
    for activity in rank.activities:
        if activity.waits is not None:
            return f"{text}, and waited in {described(activity.waits)}"
    return text
