"""A run as a trace for Perfetto and Chrome: a process for each rank, tracks for its collectives and waits.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event
Format"): complete events for operations, flow events from the last rank to the ranks that waited for it and
along transfers, and instant events for verdicts of watchdogs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from commplan.recorder.blame import missing_ranks
from commplan.recorder.collectives import Run, Slice, by_rank
from commplan.recorder.file import VERDICT
from commplan.recorder.tasks import Link, Task, links

# Numbers of tracks. Viewers show tracks in the order of their numbers. Those of collectives count from 1.
_BLOCKED = 1000  # the track of the program's waits for collectives
# Of other operations, by kind: the number before their first track, and the label.
_TASKS = {"wait": (2000, "input: waits"), "make": (3000, "input: makes"), "request": (4000, "requests"),
          "serve": (5000, "serves")}  # fmt: skip
_BOUND = (
    "no rank ends what depends on another before that one has begun: the least end - begin between two hosts "
    "over all collectives bounds how far their clocks differ; an offset is the middle of what is left"
)
_Json = dict[str, Any]  # an object of JSON


def trace(run: Run) -> bytes:
    """The trace of a run as JSON in UTF-8.

    Times are microseconds since the first begin of an operation. Unfinished operations end with the last
    event of the run.
    """
    first = min((each.begin for each in (*run.slices, *run.tasks)), default=0.0)
    slices = by_rank(run.slices)
    track_of = dict[tuple[int, float], int]()  # the track of a slice, by rank and begin
    names, events = list[_Json](), list[_Json]()
    for record in run.records:
        rank, rank_slices = record.rank, slices.get(record.rank, [])
        rank_tracks = tracks(rank_slices)
        track_of |= {(rank, each.begin): track for each, track in zip(rank_slices, rank_tracks, strict=True)}
        events += [_slice(each, track, first) for each, track in zip(rank_slices, rank_tracks, strict=True)]
        waits = [_wait(each, first) for each in rank_slices if each.waits_apart]
        label = f"rank {rank} ({record.host})"
        names += [_named("process", rank, 0, label), _named("thread", rank, 0, "watchdog")]
        for track in sorted(set(rank_tracks)):
            names.append(_named("thread", rank, track, "network" if track == 1 else f"network {track}"))
        if waits:
            names.append(_named("thread", rank, _BLOCKED, "program waits"))
        verdicts = [event for event in record.events if event.kind == VERDICT]
        # A verdict may be older than the first begin: the format has no negative times.
        events += waits + [
            {"ph": "i", "s": "p", "name": event.name, "cat": "watchdog", "pid": rank, "tid": 0,
             "ts": max(0.0, event.seconds - first) * 1e6}
            for event in verdicts
        ]  # fmt: skip
    tasks, lanes, transfers = _tasks(run, first)
    names, events = names + lanes, events + tasks
    arrows = [arrow for collective in run.collectives for arrow in _arrows(collective, track_of, first)]
    arrows += transfers
    # Both ends of an arrow have the same number.
    events += [end | {"id": number} for number, arrow in enumerate(arrows, 1) for end in arrow]
    events.sort(key=lambda event: event["ts"])
    document = {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": head(run)}
    return msgspec.json.encode(document)


def head(run: Run) -> _Json:
    """The metadata of the run, as JSON: the clocks of its hosts, lost events, and ranks without a record.

    An unknown uncertainty is None. At most the first 1000 missing ranks are listed.
    """
    clocks = [
        {
            "host": clock.host, "offset_us": clock.offset * 1e6,
            "uncertainty_us": clock.uncertainty * 1e6 if math.isfinite(clock.uncertainty) else None,
        }
        for clock in run.clocks
    ]  # fmt: skip
    ranks = run.ranks
    missing = list(missing_ranks(ranks, {record.rank for record in run.records}))
    aligned = {"hosts": clocks, "collectives": run.clock_collectives, "bound": _BOUND}
    return {"plan": run.plan, "ranks": ranks, "lost": run.lost, "missing": missing, "clocks": aligned}


def _named(kind: str, rank: int, track: int, name: str) -> _Json:
    """The metadata event that names a process (`kind` is `process`) or a track (`thread`)."""
    return {"ph": "M", "name": f"{kind}_name", "pid": rank, "tid": track, "args": {"name": name}}


def tracks(slices: Sequence[Slice] | Sequence[Task]) -> list[int]:
    """Distribute operations of a rank over tracks, on which they must not overlap.

    Args:
        slices: The operations, in order of their begin.

    Returns:
        The track of each operation, from 1: the first that is free when it begins.
    """
    ends: list[float] = []  # the end of the last operation on each track
    assigned: list[int] = []
    for each in slices:
        free = next((track for track, end in enumerate(ends) if end <= each.begin), len(ends))
        ends[free : free + 1] = [each.end]
        assigned.append(free + 1)
    return assigned


def _slice(each: Slice, track: int, first: float) -> _Json:
    """The event of a collective on a rank. Here and below, `first` is the time 0 of the trace."""
    details: _Json = {"run": each.runs, "sent_and_received": each.nbytes}
    if each.line:
        details["line"] = each.line
    if each.step:
        details |= {"phase": each.phase, "step": each.step}
    if each.details is not None:
        collective = each.details
        details |= {"kind": collective.kind, "algorithm": collective.algorithm, "nbytes": collective.nbytes}
        details |= {"dtype": collective.dtype, "axes": ", ".join(collective.axes)}
    if each.holder is not None:
        details |= {"last": each.holder, "waited_us": each.waited_s * 1e6}
    if each.predicted is not None:
        details["predicted_us"] = each.predicted * 1e6
    if each.state:
        details["state"] = each.state
    return {
        "ph": "X", "name": each.title, "cat": "network", "pid": each.rank, "tid": track, "args": details,
        **_times(each.begin, each.end, first),
    }  # fmt: skip


def _wait(each: Slice, first: float) -> _Json:
    """The event of the program's wait for a collective."""
    return {
        "ph": "X", "name": each.title, "cat": "wait", "pid": each.rank, "tid": _BLOCKED,
        "args": {"line": each.line} if each.line else {}, **_times(*each.blocked, first),
    }  # fmt: skip


def _tasks(run: Run, first: float) -> tuple[list[_Json], list[_Json], list[tuple[_Json, _Json]]]:
    """The events of operations other than collectives, the names of their tracks, and arrows between them."""
    grouped: dict[tuple[int, str], list[Task]] = {}
    for task in run.tasks:
        grouped.setdefault((task.rank, task.kind), []).append(task)
    track_of: dict[Task, int] = {}
    names: list[_Json] = []
    for (rank, kind), tasks in grouped.items():
        start, label = _TASKS[kind]
        task_tracks = [start + track for track in tracks(tasks)]
        track_of |= dict(zip(tasks, task_tracks, strict=True))
        for track in sorted(set(task_tracks)):
            names.append(
                _named("thread", rank, track, label if track == start + 1 else f"{label} {track - start}")
            )
    events = [_task(task, track, first) for task, track in track_of.items()]
    return events, names, [_transfer(link, track_of, first) for link in links(run.tasks)]


def _task(task: Task, track: int, first: float) -> _Json:
    """The event of an operation other than a collective."""
    details: _Json = {"line": task.line} if task.line else {}
    if task.kind in ("make", "wait"):  # packed, see `lane.Lane.begin`
        details |= {"epoch": task.detail >> 32, "step": task.detail & 0xFFFFFFFF}
    elif task.kind == "serve":
        details["worker"] = task.detail
    if task.state:
        details["state"] = task.state
    return {
        "ph": "X", "name": task.title, "cat": task.lane, "pid": task.rank, "tid": track, "args": details,
        **_times(task.begin, task.end, first),
    }  # fmt: skip


def _transfer(link: Link, track_of: dict[Task, int], first: float) -> tuple[_Json, _Json]:
    """The flow events at both ends of the arrow of a transfer."""
    source, target = link.source, link.target
    arrow = {"name": "made" if source.kind == "make" else source.kind, "cat": source.lane}
    tail = {"pid": source.rank, "tid": track_of[source], "ts": (link.sent - first) * 1e6}
    point = {"pid": target.rank, "tid": track_of[target], "ts": (link.arrived - first) * 1e6, "bp": "e"}
    return {"ph": "s"} | arrow | tail, {"ph": "f"} | arrow | point


def _times(begin: float, end: float, first: float) -> _Json:
    """The time and the duration of an event, in microseconds, from times in seconds."""
    return {"ts": max(0.0, begin - first) * 1e6, "dur": (end - begin) * 1e6}


def _arrows(
    collective: Sequence[Slice], track_of: dict[tuple[int, float], int], first: float
) -> Iterator[tuple[_Json, _Json]]:
    """Arrows from the begin of the last rank's slice to the slices of ranks that certainly waited for it.

    Args:
        collective: The slices of a collective.
        track_of: The track of each slice, by rank and begin.
        first: The time 0 of the trace.
    """
    begins = {each.rank: each.begin for each in collective}
    for each in collective:
        if each.holder not in begins or each.margin <= 0:
            continue
        begin = begins[each.holder]
        arrow = {"name": "arrived last", "cat": "wait"}
        tail = {"pid": each.holder, "tid": track_of[each.holder, begin], "ts": max(0.0, begin - first) * 1e6}
        arrived, track = min(each.begin + each.waited_s, each.end), track_of[each.rank, each.begin]
        point = {"pid": each.rank, "tid": track, "ts": (arrived - first) * 1e6, "bp": "e"}
        yield {"ph": "s"} | arrow | tail, {"ph": "f"} | arrow | point
