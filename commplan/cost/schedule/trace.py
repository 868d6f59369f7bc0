"""Writes a prediction as a trace for Perfetto and Chrome, with a track per lane and a color per plan line.

The format is Chrome's JSON: complete events (`ph` X) with times in microseconds, and metadata (`ph` M) with
the names of processes and threads. A phase is a process, and a lane is a thread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from commplan.cost.schedule.prediction import OpTime, PhaseTime, Prediction

# Color names that viewers of the format support; one of them is misspelled in the format.
COLORS = (
    "thread_state_running", "thread_state_runnable", "thread_state_iowait", "rail_response", "rail_animation",
    "rail_idle", "rail_load", "startup", "heap_dump_stack_frame", "cq_build_running", "cq_build_passed",
    "cq_build_attempt_runnig", "good", "bad", "terrible", "yellow", "olive", "generic_work",
)  # fmt: skip


def trace(prediction: Prediction) -> bytes:
    """The trace as JSON in UTF-8. Ops that take no time are omitted.

    Lines share a color if the plan has more lines with ops than there are `COLORS`.
    """
    lines = sorted({op.line for phase in prediction.phases for op in phase.ops})
    color = {line: COLORS[index % len(COLORS)] for index, line in enumerate(lines)}
    events: list[dict[str, Any]] = []
    for process, phase in enumerate(prediction.phases, 1):
        events += _names(process, phase)
        lanes = _lanes(phase)
        for op in phase.ops:
            if op.seconds > 0:
                events.append(_event(op, process, lanes[op.lane], color[op.line]))
    head = {"plan": prediction.plan, "topology": prediction.topology, "ranks": prediction.ranks}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": head})


def _lanes(phase: PhaseTime) -> dict[str, int]:
    """The thread number of each lane, from 1."""
    return {lane: index for index, lane in enumerate(dict.fromkeys(op.lane for op in phase.ops), 1)}


def _names(process: int, phase: PhaseTime) -> list[dict[str, Any]]:
    """The metadata events of a phase."""
    events = [_meta("process_name", process, 0, f"phase {phase.name}")]
    return events + [_meta("thread_name", process, thread, lane) for lane, thread in _lanes(phase).items()]


def _meta(name: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": text}}


def _event(op: OpTime, process: int, thread: int, color: str) -> dict[str, Any]:
    """The complete event of one op."""
    label = f"{op.op} via {op.algorithm}" if op.algorithm else op.op
    args: dict[str, Any] = {"result": op.result, "line": op.line, "seconds alone": op.alone}
    if op.source:
        args |= {"lower bound": op.bound, "from": op.source, "bytes": dict(op.nbytes)}
    return {
        "ph": "X",
        "name": f"line {op.line}: {label}",
        "cat": op.lane,
        "pid": process,
        "tid": thread,
        "ts": op.start * 1e6,
        "dur": op.seconds * 1e6,
        "cname": color,
        "args": args,
    }
