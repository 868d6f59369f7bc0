"""States of processes of this machine according to the kernel, and their texts in messages."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from commplan.recorder.rank_state import Condition

_STATES: Mapping[str, Condition] = {
    "T": "stopped",
    "t": "stopped",
    "D": "stuck in the kernel",
    "Z": "dead",
    "X": "dead",
}
_STARTED, _ROUNDING_S = 18, 1.0  # the field with the start of the process, after its state
_IN_WORDS = {
    "dead": "has died",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "stuck in the kernel": "is stuck in the kernel (a disk or a file system that does not answer)",
    "alive": "does not answer: its process lives, and its threads do not run",
}


def process_state(number: int, age_s: float = 0.0) -> Condition:
    """Return `alive`, `stopped`, `stuck in the kernel` or `dead`.

    Args:
        number: The process number.
        age_s: The age of the process in seconds, at least. If the process with this number is younger, the
            process is dead, and its number is used again.
    """
    try:
        text = Path(f"/proc/{number}/stat").read_text("utf-8", "replace")
    except OSError:
        return "dead"
    state, *fields = text.rpartition(")")[2].split()
    started_s = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    if time.clock_gettime(time.CLOCK_BOOTTIME) - started_s < age_s - _ROUNDING_S:
        return "dead"
    return _STATES.get(state, "alive")


def silence(state: str, host: str) -> str:
    """The condition of a process on `host` that cannot go on, for a message."""
    unreachable = f"does not answer: it is stopped or dead, or host {host} cannot be reached"
    return _IN_WORDS.get(state, unreachable)


def identity(who: str, number: int, process: int, host: str, state: str) -> str:
    """The operating system's name of process `number` of a job, and what to do if it is stopped.

    Args:
        who: The noun for a process in messages, such as `rank`.
        process: Its process number on `host`.
    """
    lives = f", and lives: kill -CONT {process} lets it end" if state == "stopped" else ""
    return f"{who} {number} is PID {process} on {host}{lives}"
