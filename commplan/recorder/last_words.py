"""The message about the end of a job, from its records. The sidecar prints it after the last process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.recorder import verdict
from commplan.recorder.blame import Rank, described, first_death, ranks_of, states_of
from commplan.recorder.file import FAILED, VERDICT, Record
from commplan.recorder.reading import read_records

_SHOWN = 4  # maximum number of deaths that are listed after the first
_ENDED_WITH = "has ended with "  # precedes an exception in the text that `file.Recording.remove` writes


def read_jobs(paths: Iterable[Path]) -> list[Record]:
    """Read all records of the jobs to which the records at `paths` belong.

    Damaged and missing files are skipped. The records of a job are found by the names of their files.
    """
    records: list[Record] = []
    jobs = dict.fromkeys((path.parent, path.name.split(".")[0]) for path in paths)
    for path in (path for folder, job in jobs for path in sorted(folder.glob(f"{job}.*rec"))):
        with contextlib.suppress(CommplanError):
            records += read_records([str(path)])
    return records


def last_words(records: Sequence[Record], noun: str, killed: int) -> str:
    """The error that names the process that died first, and how it died.

    Args:
        records: The records of one job, at least one.
        noun: The noun for a rank in messages, such as `process`.
        killed: The number of processes of this host that the kernel has killed for lack of memory
            since the sidecar started.

    Returns:
        The rendered error CP0834, with a line break at its end. Empty if no death is known, if a launcher,
        scheduler or user ended the job, or if a rank recorded a failure or a verdict.
    """
    ranks = ranks_of(records)
    first = first_death(ranks)
    if first is None or any(event.kind in (VERDICT, FAILED) for record in records for event in record.events):
        return ""
    deaths = [rank for rank in ranks if rank.state == "dead" and rank.end and rank is not first]
    deaths.sort(key=lambda rank: (rank.end.startswith("was ended"), rank.gone_s))
    text, *notes = [
        f"{noun} {rank.rank} (process {rank.process} on {rank.host}) {rank.end}{_place(rank)}"
        for rank in (first, *deaths[:_SHOWN])
    ]
    # JAX aborts processes that lose another one: an exception on the latter is the cause.
    ended = (rank for rank in ranks if rank.state == "ended")
    raised = next((rank for rank in ended if rank.end.startswith(_ENDED_WITH)), None)
    if raised is not None and first.end.startswith("was aborted"):
        reason = raised.end.removeprefix(_ENDED_WITH)
        text, *notes = [f"the program has ended on {noun} {raised.rank}: {reason}", text, *notes]
    # The communication library aborts processes whose messages do not match: another order is the cause.
    states = states_of(ranks, first.gone_s, {})
    judgement = verdict.blame(states)
    if judgement.kind == "order":
        text, *notes = [
            *verdict.described(judgement, states, noun, first.rank).split("\nnote: "),
            text,
            *notes,
        ]
    if max(record.ranks for record in records) > len(ranks):
        notes.append(
            "the records of ranks on other hosts, which may have ended before, are not available here"
        )
    if killed:
        number = "1 process" if killed == 1 else f"{killed} processes"
        notes.append(f"the kernel killed {number} on this host for lack of memory during the job")
    notes.append("reported by the sidecar of this host: no process of the job is left there")
    return f"{CommplanError(Diagnostic('CP0834', text, None, tuple(map(Note, notes))))}\n"


def _place(rank: Rank) -> str:
    """The end of a sentence: the operation in which the rank was."""
    if rank.waits:
        return f" in {described(rank.waits)}"
    text = f", in no collective; it last finished {described(rank.last)}" if rank.last else ""
    for activity in rank.activities:
        if activity.waits is not None:
            return f"{text}, and waited in {described(activity.waits)}"
    return text
