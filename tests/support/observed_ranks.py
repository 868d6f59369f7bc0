"""Ranks whose records an observer reads, for its tests."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from commplan.hang_limits import HangLimits
from commplan.recorder import live
from commplan.recorder.file import BEGIN, END, EVENT, EVENTS, HEAD, LIVE, Call, Details, Recording, put_name
from commplan.recorder.rank_state import Comparison
from commplan.sidecar.mail import Address, SidecarMessage
from commplan.sidecar.observer import Job
from commplan.sidecar.process import AttendedProcess

LINE, OTHER_LINE = "line 6 of x.plan", "line 7 of x.plan"
BOUND_S, BUSY_S = 2.0, 30.0
FAR, HERE = Address("far", 1, "key", ("10.0.0.2",)), Address("here", 2, "own", ("10.0.0.1",))


class FakeProcess(AttendedProcess):
    """A process of the tests. `said`: the text that was printed on its standard error."""

    def __init__(self, number: int) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.number, self.seconds, self.queried_at = number, 0.0, 0.0
        self.stack, self.said = f"train.py:{number} in load", ""

    def request_stack(self) -> None:
        pass

    def write_stderr(self, text: str) -> None:
        self.said += text


class Ranks:
    """A job of `ranks` ranks, of which those in `local` are on this host. `sent`: messages to other hosts."""

    def __init__(self, ranks: int, local: Sequence[int], lane: str = "") -> None:
        self.sent: list[SidecarMessage] = []
        self.receivers: list[Address] = []
        self.job = Job("job", self.send, HERE)
        self.recordings: dict[int, Recording] = {}
        self.processes: dict[int, FakeProcess] = {}
        for rank in local:
            axes = {"data": ranks} if not lane else None
            recording = self.recordings[rank] = Recording("job", "x", rank, ranks, axes, lane)
            live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
            process = self.processes[rank] = FakeProcess(100 + rank)
            self.job.table.track(recording.path, process)

    def send(self, message: SidecarMessage, to: Sequence[Address]) -> None:
        self.sent.append(message)
        self.receivers = list(to)

    def poll(self, after_s: float = 0.0) -> None:
        """Poll twice, at this time and when the first result is confirmed."""
        now = time.monotonic() + after_s
        self.job.poll(now)
        self.job.poll(now + 0.6)

    def verdict(self, rank: int) -> str:
        """The verdict in the record of a rank, whenever it applies."""
        recording = self.recordings[rank]
        (effective,) = struct.unpack_from("<q", recording.memory, LIVE + 128)
        return recording.memory[LIVE + 144 : LIVE + 4000].split(b"\0")[0].decode() if effective else ""


def put(recording: Recording, **fields: int) -> None:
    """Write fields of the `Live` block, as the engine does."""
    for name, value in fields.items():
        struct.pack_into("<q", recording.memory, LIVE + 8 * live.Live._fields.index(name), value)


def began(recording: Recording, line: str, *, runs: int = 5, ends: bool = False) -> None:
    """Record that a rank has begun `line` for the `runs`th time, and finished it before."""
    details = Details("all_reduce", "ring", 0, "f32", 0, "", ("data",))
    index = int(line == OTHER_LINE)
    put_name(recording.memory, index, f"{line}\0{details.text()}")
    now, (head,) = time.monotonic_ns(), struct.unpack_from("<q", recording.memory, HEAD)
    events = [(kind, run) for run in range(1, runs + 1) for kind in (BEGIN, END)]
    for kind, run in events if ends else events[:-1]:
        at = EVENTS + EVENT.size * head
        when = now - (runs - run) * 10_000_000 + (kind == END) * 1000
        EVENT.pack_into(recording.memory, at, when, kind, index, 100 * index + run, run, 0)
        head += 1
    struct.pack_into("<q", recording.memory, HEAD, head)
    put(recording, moved=now, waits=0 if ends else now)


def joins(
    recording: Recording, number: int, *, compares: str = "", name: str = "train", group: int = 0
) -> None:
    """Record that a rank has begun step `number`, or compares it as the rank `compares`."""
    message = f"{compares} differs from {{}}"
    compared = Comparison(compares, name, message, "a fix", "run.py:7 in main")
    recording.put_call(Call((compared if compares else Comparison("", name)).text(), 0.0))
    position = live.position(number, 1) if compares else live.position(number)
    since = time.monotonic() if compares else None
    live.put_comparison(recording, position, since, group, is_ahead=bool(compares))


def waiting(ranks: Ranks, late: int) -> Ranks:
    """All ranks but `late` wait in line 6."""
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, runs=5 - (rank == late), ends=rank == late)
    return ranks
