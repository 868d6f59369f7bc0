"""Records as a trace for Perfetto and Chrome: a process for each rank, a track for each plan line.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event
Format", complete events). Clocks are those of the hosts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from commplan.recorder.file import BEGIN, END, FAILED, Record

_LINE = re.compile(r"line (\d+)")


def trace(records: Sequence[Record]) -> bytes:
    """The trace as JSON; times count from the first event. What is unfinished ends with the last event."""
    moments = [event.seconds for record in records for event in record.events]
    first, latest = min(moments, default=0.0), max(moments, default=0.0)
    events: list[dict[str, Any]] = []
    for record in records:
        label = f"rank {record.rank} ({record.host})"
        events.append({"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": label}})
        events += _slices(record, first, latest)
    head = {"plan": records[0].plan if records else "", "lost": sum(record.lost for record in records)}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": head})


def _slices(record: Record, first: float, latest: float) -> list[dict[str, Any]]:
    ends = {event.operation: event for event in record.events if event.kind in (END, FAILED)}
    begun = [event for event in record.events if event.kind == BEGIN]
    tracks = {name: track for track, name in enumerate(dict.fromkeys(event.name for event in begun), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": record.rank, "tid": track, "args": {"name": name}}
        for name, track in tracks.items()
    ]
    for event in begun:
        end = ends.get(event.operation)
        line = _LINE.search(event.name)
        details: dict[str, Any] = {"run": event.runs, "nbytes": event.nbytes}
        if line:
            details["line"] = int(line[1])
        if end is None or end.kind == FAILED:
            details["state"] = "unfinished" if end is None else "failed"
        until = latest if end is None else end.seconds
        place = {"pid": record.rank, "tid": tracks[event.name]}
        when = {"ts": (event.seconds - first) * 1e6, "dur": (until - event.seconds) * 1e6}
        events.append({"ph": "X", "name": event.name, "cat": "network", "args": details} | place | when)
    return events
