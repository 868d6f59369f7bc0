"""A run as a trace for Perfetto and Chrome: a process for each rank, tracks for its collectives and waits.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event
Format"): complete events, and flow events from the last rank to the ranks that waited for it.
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

# Tracks: those of collectives count from 1, then the program's waits for them, then other operations.
_BLOCKED = 1000
_TASKS = {"wait": (2000, "input: waits"), "make": (3000, "input: makes"), "request": (4000, "requests"),
          "serve": (5000, "serves")}  # fmt: skip
_BOUND = (
    "no rank ends what depends on another before that one has begun: the least end - begin between two hosts "
    "over all collectives bounds how far their clocks differ; an offset is the middle of what is left"
)
_Json = dict[str, Any]


def trace(run: Run) -> bytes:
    """The trace as JSON. Times count from the first begin. Unfinished operations end with the last event."""
    first = min((each.begin for each in (*run.slices, *run.tasks)), default=0.0)
    slices, place = by_rank(run.slices), dict[tuple[int, float], int]()
    names, events = list[_Json](), list[_Json]()
    for record in run.records:
        rank, rank_slices = record.rank, slices.get(record.rank, [])
        placed = tracks(rank_slices)
        place |= {(rank, each.begin): track for each, track in zip(rank_slices, placed, strict=True)}
        events += [_slice(each, track, first) for each, track in zip(rank_slices, placed, strict=True)]
        waits = [_wait(each, first) for each in rank_slices if each.waits_apart]
        label = f"rank {rank} ({record.host})"
        names += [_named("process", rank, 0, label), _named("thread", rank, 0, "watchdog")]
        for track in sorted(set(placed)):
            names.append(_named("thread", rank, track, "network" if track == 1 else f"network {track}"))
        if waits:
            names.append(_named("thread", rank, _BLOCKED, "program waits"))
        verdicts = [event for event in record.events if event.kind == VERDICT]
        events += waits + [
            {"ph": "i", "s": "p", "name": event.name, "cat": "watchdog", "pid": rank, "tid": 0,
             "ts": max(0.0, event.seconds - first) * 1e6}
            for event in verdicts
        ]  # fmt: skip
    tasks, lanes, transfers = _tasks(run, first)
    names, events = names + lanes, events + tasks
    arrows = [arrow for collective in run.collectives for arrow in _arrows(collective, place, first)]
    arrows += transfers
    events += [end | {"id": number} for number, arrow in enumerate(arrows, 1) for end in arrow]
    events.sort(key=lambda event: event["ts"])
    document = {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": head(run)}
    return msgspec.json.encode(document)


def head(run: Run) -> _Json:
    """The metadata of the run: the clocks of its hosts, and missing records."""
    clocks = [
        {
            "host": clock.host, "offset_us": clock.offset * 1e6,
            "uncertainty_us": clock.uncertainty * 1e6 if math.isfinite(clock.uncertainty) else None,
        }
        for clock in run.clocks
    ]  # fmt: skip
    ranks = run.ranks
    missing = list(missing_ranks(ranks, {record.rank for record in run.records}))
    aligned = {"hosts": clocks, "collectives": run.synchronised, "bound": _BOUND}
    return {"plan": run.plan, "ranks": ranks, "lost": run.lost, "missing": missing, "clocks": aligned}


def _named(kind: str, rank: int, track: int, name: str) -> _Json:
    return {"ph": "M", "name": f"{kind}_name", "pid": rank, "tid": track, "args": {"name": name}}


def tracks(slices: Sequence[Slice] | Sequence[Task]) -> list[int]:
    """The track of each slice of a rank, in order of their begin: the first track that is free then."""
    ends: list[float] = []
    placed: list[int] = []
    for each in slices:
        free = next((track for track, end in enumerate(ends) if end <= each.begin), len(ends))
        ends[free : free + 1] = [each.end]
        placed.append(free + 1)
    return placed


def _slice(each: Slice, track: int, first: float) -> _Json:
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
    return {
        "ph": "X", "name": each.title, "cat": "wait", "pid": each.rank, "tid": _BLOCKED,
        "args": {"line": each.line} if each.line else {}, **_times(*each.blocked, first),
    }  # fmt: skip


def _tasks(run: Run, first: float) -> tuple[list[_Json], list[_Json], list[tuple[_Json, _Json]]]:
    """The slices of operations other than collectives, the names of their tracks, and arrows between them."""
    grouped: dict[tuple[int, str], list[Task]] = {}
    for task in run.tasks:
        grouped.setdefault((task.rank, task.kind), []).append(task)
    place: dict[Task, int] = {}
    names: list[_Json] = []
    for (rank, kind), tasks in grouped.items():
        start, label = _TASKS[kind]
        placed = [start + track for track in tracks(tasks)]
        place |= dict(zip(tasks, placed, strict=True))
        for track in sorted(set(placed)):
            names.append(
                _named("thread", rank, track, label if track == start + 1 else f"{label} {track - start}")
            )
    slices = [_task(task, track, first) for task, track in place.items()]
    return slices, names, [_transfer(link, place, first) for link in links(run.tasks)]


def _task(task: Task, track: int, first: float) -> _Json:
    details: _Json = {"line": task.line} if task.line else {}
    if task.kind in ("make", "wait"):
        details |= {"epoch": task.detail >> 32, "step": task.detail & 0xFFFFFFFF}
    elif task.kind == "serve":
        details["worker"] = task.detail
    if task.state:
        details["state"] = task.state
    return {
        "ph": "X", "name": task.title, "cat": task.lane, "pid": task.rank, "tid": track, "args": details,
        **_times(task.begin, task.end, first),
    }  # fmt: skip


def _transfer(link: Link, place: dict[Task, int], first: float) -> tuple[_Json, _Json]:
    source, target = link.source, link.target
    arrow = {"name": "made" if source.kind == "make" else source.kind, "cat": source.lane}
    tail = {"pid": source.rank, "tid": place[source], "ts": (link.sent - first) * 1e6}
    point = {"pid": target.rank, "tid": place[target], "ts": (link.arrived - first) * 1e6, "bp": "e"}
    return {"ph": "s"} | arrow | tail, {"ph": "f"} | arrow | point


def _times(begin: float, end: float, first: float) -> _Json:
    return {"ts": max(0.0, begin - first) * 1e6, "dur": (end - begin) * 1e6}


def _arrows(
    collective: Sequence[Slice], place: dict[tuple[int, float], int], first: float
) -> Iterator[tuple[_Json, _Json]]:
    """Arrows from the slice of the last rank to the slices of waiting ranks, at the time of its begin."""
    begins = {each.rank: each.begin for each in collective}
    for each in collective:
        if each.holder not in begins or each.margin <= 0:
            continue
        begin = begins[each.holder]
        arrow = {"name": "arrived last", "cat": "wait"}
        tail = {"pid": each.holder, "tid": place[each.holder, begin], "ts": max(0.0, begin - first) * 1e6}
        at = min(each.begin + each.waited_s, each.end)
        point = {"pid": each.rank, "tid": place[each.rank, each.begin], "ts": (at - first) * 1e6, "bp": "e"}
        yield {"ph": "s"} | arrow | tail, {"ph": "f"} | arrow | point
