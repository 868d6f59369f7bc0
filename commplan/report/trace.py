"""Read a recorded run in Chrome's trace format: complete events with `cat`, `pid`, `tid`, `args.line`.

A lane is a thread of a process, named by the metadata events of the file. Other events are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from commplan import io
from commplan.diagnostics import fail
from commplan.report.document import EventLane, LaneEvent, Trace
from commplan.report.lanes import condensed
from commplan.report.timeline import work_on

TEXT = 200  # most characters of a name


class _ChromeEvent(msgspec.Struct):
    """An event of the file, with the field names of the format.

    Attributes:
        ph: the kind of event: `X` for complete events, `M` for metadata.
        name: the name; of metadata, such as `thread_name`.
        cat: the category, which determines the kind of work.
        pid: the process.
        tid: the thread.
        ts: the start in microseconds.
        dur: the duration in microseconds.
        args: details: `line` is the plan line, and `name` the value of metadata.
    """

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _ChromeTrace(msgspec.Struct):
    """A file that is an object; it may also be a list of events."""

    traceEvents: list[_ChromeEvent]  # noqa: N815  field name of the format


def read_trace(text: str, name: str) -> Trace:
    """Parse a trace.

    Args:
        text: the content of the file.
        name: its name, for the trace and for errors.

    Raises:
        CommplanError: CP1113 if it is invalid or has no complete event.
    """
    kind = list[_ChromeEvent] if text.lstrip().startswith("[") else _ChromeTrace
    try:
        decoded: list[_ChromeEvent] | _ChromeTrace = io.decode_json(text, kind)
    except ValueError as error:
        fail("CP1113", f"the trace cannot be read: {error}", "expected Chrome's trace format", file=name)
    events = decoded.traceEvents if isinstance(decoded, _ChromeTrace) else decoded
    complete = sorted(
        (event for event in events if event.ph == "X" and event.dur > 0), key=lambda event: event.ts
    )
    if not complete:
        fail("CP1113", "the trace has no complete event (`ph` X with a duration)", file=name)
    # Names of processes and threads; those of processes have no thread.
    titles = {
        (event.name, event.pid, event.tid if event.name == "thread_name" else 0): str(event.args["name"])
        for event in events
        if event.ph == "M" and "name" in event.args
    }
    first = complete[0].ts
    lanes: dict[tuple[int | str, int | str], list[LaneEvent]] = {}
    for event in complete:
        lanes.setdefault((event.pid, event.tid), []).append(_event(event, first))
    shown, left_out = condensed([
        EventLane(
            titles.get(("thread_name", pid, tid), f"thread {tid}")[:TEXT],
            tuple(lane_events),
            titles.get(("process_name", pid, 0), f"process {pid}")[:TEXT],
        )
        for (pid, tid), lane_events in sorted(lanes.items(), key=lambda lane: str(lane[0][0]))
    ])  # fmt: skip
    end = max(event.ts + event.dur for event in complete)
    return Trace(name, (end - first) / 1e6, shown, left_out)


def _event(event: _ChromeEvent, first: float) -> LaneEvent:
    """Convert an event; `first` is the start of the trace in microseconds."""
    line = event.args.get("line")
    seconds = event.dur / 1e6
    return LaneEvent(
        event.name[:TEXT],
        line if isinstance(line, int) else 0,
        (event.ts - first) / 1e6,
        seconds,
        work_on(event.cat),
        busy=seconds,
    )
