"""Records as a run leaves them, without one: rings filled with events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

from commplan.recorder.file import (
    BEGIN,
    CAPACITY,
    END,
    EVENT,
    HEADER,
    MOST_NAMES,
    NAME,
    Details,
    Event,
    Recording,
)


def write_record(
    folder: Path, plan: str, rank: int, axes: Mapping[str, int], events: Iterable[Event], ranks: int = 0
) -> Path:
    """The record of a rank below `folder`, its events in the ring; seconds since the machine booted."""
    count = ranks or math.prod(axes.values())
    with mock.patch.dict("os.environ", COMMPLAN_RECORDS=str(folder)):
        recording = Recording("5f0c", plan, rank, count, axes)
    memory, names = recording.memory, dict[bytes, int]()
    head = 0
    for head, event in enumerate(events, 1):
        text = event.name.encode() + (b"\0" + event.details.text().encode() if event.details else b"")
        index = names.setdefault(text, len(names))
        at = HEADER.size + NAME * index
        memory[at : at + len(text)] = text
        place = HEADER.size + NAME * MOST_NAMES + EVENT.size * ((head - 1) % CAPACITY)
        EVENT.pack_into(
            memory,
            place,
            int(event.seconds * 1e9),
            event.kind,
            index,
            event.operation,
            event.runs,
            event.nbytes,
        )
    fields = list(HEADER.unpack_from(memory))
    fields[8], fields[9] = head, len(names)
    HEADER.pack_into(memory, 0, *fields)
    return recording.path


def data_parallel(folder: Path, steps: int = 6, nbytes: int = 16640) -> Path:
    """Eight ranks that ran `examples/plans/data_parallel.plan`; rank 3 comes ten milliseconds late."""
    axes = {"data": 8}
    for rank in range(8):
        events, number = list[Event](), 0
        for step in range(1, steps + 1):
            for kind in ("all_to_all", "all_gather"):
                number += 1
                opens = "step" if kind == "all_to_all" else ""
                details = Details(kind, "native", nbytes, "bfloat16", 0, opens, ("data",))
                arrives = step + (kind == "all_gather") * 0.05 + 0.001 * rank + (rank == 3) * 0.01
                ends = step + (kind == "all_gather") * 0.05 + 0.02
                name = "line 16 of data_parallel.plan"
                events.append(Event(arrives, BEGIN, name, number, step, 0, details))
                events.append(Event(ends, END, name, number, step, 0, details))
        write_record(folder, "data_parallel", rank, axes, events)
    return folder
