"""`commplan blame`: find the rank that blocked the others, from flight records."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from commplan.cli.console import Console, fold_table
from commplan.cli.records import runs
from commplan.recorder.blame import Activity, Blame, Rank, blame, described
from commplan.recorder.file import Event
from commplan.recorder.stacks import main_stack
from commplan.recorder.verdict import listed

_SHOWN = 100  # most ranks without a record that are listed
# The words for kinds of activities outside of collectives.
_VERBS = {"make": "makes", "wait": "waits for", "request": "asks in", "serve": "has not answered"}


def run(args: Namespace, console: Console) -> int:
    """Print the blocking ranks; returns 1 if there are any. Raises CP1114 for files that are not records."""
    verdicts = [
        blame(records, lambda record: main_stack(Path(record.path))) for records in runs(args.records)
    ]
    if not console.is_human:
        console.document(runs=[_data(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            _show(verdict, console)
    return int(any(verdict.holders or verdict.verdicts for verdict in verdicts))


def _show(verdict: Blame, console: Console) -> None:
    """Print a run: a table of its ranks, the blocking ranks, and the ranks without a record."""
    table = fold_table("rank", "process", "is", "last finished", "now")
    for rank in verdict.ranks:
        process, state = f"{rank.process} on {rank.host}", _state(rank)
        if rank.collective or not rank.activities:
            table.add_row(str(rank.rank), process, state, _last(rank.last, verdict), _now(rank, verdict))
            process = state = ""
        for activity in rank.activities:
            name = f"{rank.rank} {activity.lane}"
            table.add_row(name, process, state, _last(activity.last, verdict), _does(activity, verdict))
            process = state = ""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(verdict.started))
    console.put(f"plan {verdict.plan or '(without a name)'}, started {started}\n")
    console.show(lambda screen: screen.print(table), 130)
    for rank, reason in verdict.holders.items():
        console.put(f"rank {rank} blocks the others: {reason}\n")
    for text in dict.fromkeys(verdict.verdicts.values()):
        ranks = [rank for rank, other in verdict.verdicts.items() if other == text]
        console.put(f"verdict of {listed('rank', ranks)}: {text}\n")
    if not verdict.holders and not verdict.verdicts:
        console.put("no rank blocks the others\n")
    other_hosts = {rank.host for rank in verdict.ranks if rank.state == "unknown"}
    if other_hosts:
        hosts = ", ".join(sorted(other_hosts))
        console.put(f"to see whether processes on {hosts} run, use commplan blame there\n")
    if verdict.missing:
        more = verdict.absent - len(verdict.missing[:_SHOWN])
        missing = ", ".join(map(str, verdict.missing[:_SHOWN])) + (f" and {more:,} more" if more else "")
        console.put(f"no record of ranks {missing}: they ended well, or are on another host\n")


def _state(rank: Rank) -> str:
    """The state of a process, with its end unless this only repeats the state."""
    return f"{rank.state}: it {rank.end}" if rank.end not in ("", f"has {rank.state}") else rank.state


def _last(last: Event | None, verdict: Blame) -> str:
    """The last completed event in words, with its age."""
    return f"{described(last)}, {verdict.seconds - last.seconds:.1f} s ago" if last else "nothing"


def _now(rank: Rank, verdict: Blame) -> str:
    """The collective that a rank waits in, in words."""
    if rank.waits is None:
        return "in no collective"
    text = f"in {described(rank.waits)}, for {verdict.seconds - rank.waits.seconds:.1f} s"
    return f"{text}, {rank.progress}" if rank.progress else text


def _does(activity: Activity, verdict: Blame) -> str:
    """Describe an activity of a rank outside of collectives, such as loading a batch."""
    texts: list[str] = []
    for event in (activity.waits, activity.makes):
        if event is not None and event.details is not None:
            age = f"for {verdict.seconds - event.seconds:.1f} s"
            texts.append(f"{_VERBS[event.details.kind]} {described(event)}, {age}")
    if texts and activity.waits is not None and activity.progress:
        texts[0] += f", of rank {activity.progress.rank}"
    if activity.call is not None:
        texts.append(activity.call.sentence(verdict.seconds))
    return "; ".join(texts) or "nothing"


def _data(verdict: Blame) -> dict[str, Any]:
    """The JSON document of a run."""

    def event_data(event: Event | None) -> dict[str, Any] | None:
        return event and {"name": event.name, "run": event.runs, "age_s": verdict.seconds - event.seconds}

    def activity_data(activity: Activity) -> dict[str, Any]:
        call = activity.call
        age_s = verdict.seconds - call.seconds if call else 0.0
        return {
            "lane": activity.lane, "last": event_data(activity.last), "waits": event_data(activity.waits),
            "makes": event_data(activity.makes),
            "progress": activity.progress and activity.progress._asdict(),
            "call": call and {"text": call.text, "age_s": age_s, "stack": call.stack},
        }  # fmt: skip

    ranks = [
        {
            "rank": rank.rank, "process": rank.process, "host": rank.host, "state": rank.state,
            "end": rank.end, "last": event_data(rank.last), "waits": event_data(rank.waits),
            "progress": rank.progress and rank.progress._asdict(),
            "activities": list(map(activity_data, rank.activities)),
        }
        for rank in verdict.ranks
    ]  # fmt: skip
    holders = [{"rank": rank, "reason": reason} for rank, reason in verdict.holders.items()]
    verdicts = [{"rank": rank, "text": text} for rank, text in verdict.verdicts.items()]
    return {
        "plan": verdict.plan, "ranks": ranks, "holders": holders, "verdicts": verdicts,
        "missing": list(verdict.missing), "absent": verdict.absent,
    }  # fmt: skip
