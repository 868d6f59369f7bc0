"""Shared code of all places of the campaign: a fault, its outcome, watching a job, and the table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

GRACE_S = 5.0  # after the bound, for the first message
START_S = 300.0  # of a job, until its fault: the engine may have to be compiled first
DEADLINE_S = 90.0  # from the fault on: what lasts longer hangs
POLL_S = 0.02
LATEST_S = 3.0  # for the sidecar to report, after all processes have ended in silence
MORE_S = 1.0  # the same after a report: a second one may name another process
LINKS, LINK_S = ("down", "slow"), 0.5  # faults of links, and the seconds until they take effect
MARK = re.compile(r"fault at ([\d.]+)")
SAID = re.compile(r"error\[CP|commplan: |signal \d|loss is not finite")
# A separate mount over /dev/shm, full from the start: other processes of the machine keep theirs.
FULL = 'mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16k /dev/zero > /dev/shm/full; exec "$0" "$@"'


class Fault(NamedTuple):
    """The fault of `culprit` in step `step` of a job at `place`. `via` is a variant defined by the place."""

    place: str
    kind: str
    culprit: int
    step: int
    elements: int
    via: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def fault_of(words: Sequence[str]) -> Fault:
    """The fault of these words."""
    place, kind, culprit, step, elements, via = words
    return Fault(place, kind, int(culprit), int(step), int(elements), via)


class Job(NamedTuple):
    """The observation of a job.

    Attributes:
        seconds: from the fault to the first message after it, None without one.
        ended: whether all processes that can end did so in time.
    """

    seconds: float | None
    ended: bool
    text: str


class Outcome(NamedTuple):
    """`right`: whether the messages name the culprit and the waiting line, and no other process."""

    fault: Fault
    seconds: float | None
    ended: bool
    right: bool
    text: str


class Place(NamedTuple):
    """A place of faults.

    Attributes:
        kinds: of faults.
        bound_s: the time limit of the first message.
        draw: draws a fault of a kind.
        judge: runs a job with that fault, and returns whether its messages are right.
    """

    kinds: tuple[str, ...]
    bound_s: float
    draw: Callable[[Any, str], Fault]
    judge: Callable[[Fault], Outcome]


def begin() -> None:
    """Says when the fault happens, for `observed`."""
    print(f"fault at {time.time():.3f}", flush=True)


def happen(kind: str) -> None:
    """Raises, ends, or holds this process up."""
    if kind in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "raise":
        raise ArithmeticError("loss is not finite")
    elif kind == "sleep":
        time.sleep(DEADLINE_S * 2)
    elif kind == "lock":
        re.match("(a+)+$", "a" * 40 + "b")  # for years, in C, with the interpreter's lock
    elif kind in LINKS:
        time.sleep(LINK_S)


def without_memory(words: Sequence[str]) -> list[str]:
    """The words that run `words` where /dev/shm is full; root alone may."""
    return ["unshare", "-m", "sh", "-c", FULL, *words]


def observed(
    jobs: Sequence[subprocess.Popen[Any]],
    output: Any,
    over: Callable[[str], bool] | None = None,
    on_fault: Callable[[], None] = lambda: None,
) -> Job:
    """Watch `jobs`, which write to the file `output`, until they have ended; then end the remaining
    processes.

    Args:
        jobs: each the leader of a separate session.
        over: replaces the criterion that all processes that can end have ended, by their output.
        on_fault: called when the fault has happened.
    """
    over = over or (lambda text: all(job.poll() is not None for job in jobs))
    until, marked, report_time, ended, text = time.monotonic() + START_S, None, None, False, ""
    while time.monotonic() < until and not ended:
        time.sleep(POLL_S)
        ended = over(text)  # the last output is read below
        text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
        if marked is None and (mark := MARK.search(text)):
            marked, until = mark, time.monotonic() + DEADLINE_S
            on_fault()
        if marked is not None and report_time is None and SAID.search(text, marked.end()):
            report_time = time.time() - float(marked[1])
    until = time.monotonic() + (LATEST_S if report_time is None else MORE_S)
    while ended and time.monotonic() < until:  # the sidecar may still report
        time.sleep(POLL_S)
        text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
        if marked is not None and report_time is None and SAID.search(text, marked.end()):
            report_time = time.time() - float(marked[1])
    for job in jobs:
        for process in {job.pid, *_session(job.pid)}:  # ranks are in separate groups
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.wait()
    return Job(report_time, ended and marked is not None, text)


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    processes: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(status.read_text().rpartition(")")[2].split()[3]) == leader:
                processes.append(int(status.parent.name))
    return processes


def blamed(text: str) -> set[int]:
    """The ranks or processes that the text names as the cause, also in a later message of the sidecar."""
    states = "is stopped|has died|has not arrived|does not answer|was aborted"
    who = r"(?:rank|process) (\d)"
    causes = rf"{who} (?:{states})|program has ended on {who}|error\[CP0834\]: {who} \(process"
    return {int("".join(numbers)) for numbers in re.findall(causes, text)}


def resumed(file: Path | None, judge: Callable[[Fault], Outcome], fault: Fault) -> Outcome:
    """The outcomes in `file`, a line of JSON each, or that of a new job, which is appended."""
    if file is not None and file.exists():
        for line in file.read_text("utf-8").splitlines():
            words, *result = json.loads(line)
            if words == list(fault):
                return Outcome(fault, *result)
    outcome = judge(fault)
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([list(fault), *outcome[1:]]) + "\n")
    return outcome


def in_time(outcome: Outcome, bound_s: float) -> bool:
    """Whether it was first heard of within the bound and `GRACE_S`, or rightly not at all."""
    if outcome.seconds is None:
        return outcome.ended and outcome.right
    return outcome.seconds <= bound_s + GRACE_S


def table(outcomes: Sequence[Outcome], bounds: dict[str, float]) -> list[str]:
    """A line for each place and kind."""
    by_kind: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.fault.place, outcome.fault.kind].append(outcome)
    head = f"{'place':9}{'fault':14}{'jobs':>6}{'ended':>7}{'right':>7}{'in time':>9}"
    lines = [f"{head}{'median s':>10}{'longest s':>11}"]
    for (place, kind), own in by_kind.items():
        seconds = sorted(outcome.seconds for outcome in own if outcome.seconds is not None)
        ended, right = (sum(column) for column in zip(*((o.ended, o.right) for o in own), strict=True))
        soon = sum(in_time(outcome, bounds[place]) for outcome in own)
        line = f"{place:9}{kind:14}{len(own):6}{ended:7}{right:7}{soon:9}"
        middle = (
            f"{seconds[len(seconds) // 2]:10.1f}{seconds[-1]:11.1f}" if seconds else f"{'-':>10}{'-':>11}"
        )
        lines.append(line + middle)
    return lines
