"""States of processes of this machine, from `/proc`, and the texts for them in messages."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from commplan.recorder.rank_state import Condition

_STATES: Mapping[str, Condition] = {  # by the letter in /proc/PID/stat; other letters mean `alive`
    "T": "stopped",
    "t": "stopped",
    "D": "stuck in the kernel",
    "Z": "dead",
    "X": "dead",
}
_STARTED = 18  # the index of `starttime` among the fields of /proc/PID/stat after the state
_ROUNDING_S = 1.0  # maximum error of the age of a process, in seconds
_IN_WORDS = {
    "dead": "has died",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "stuck in the kernel": "is stuck in the kernel (a disk or a file system that does not answer)",
    "alive": "does not answer: its process lives, and its threads do not run",
}


def process_state(number: int, age_s: float = 0.0) -> Condition:
    """Return the state of a process of this machine: `alive`, `stopped`, `stuck in the kernel` or `dead`.

    Args:
        number: The process number.
        age_s: The minimum age of the process in seconds. If the process with this number is younger, the
            number has been reused, and the state is `dead`.
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
    """The predicate of a message about a process on `host` that does not answer.

    Args:
        state: A result of `process_state`, or any other text if the state is unknown.
        host: The name of the host.
    """
    unreachable = f"does not answer: it is stopped or dead, or host {host} cannot be reached"
    return _IN_WORDS.get(state, unreachable)


def identity(noun: str, number: int, process: int, host: str, state: str) -> str:
    """A sentence with the PID and the host of a process of a job, and how to end it if it is stopped.

    Args:
        noun: The noun for a process in messages, such as `rank`.
        number: The number of the process in the job.
        process: Its process number on `host`.
        host: The name of the host.
        state: A result of `process_state`.
    """
    lives = f", and lives: kill -CONT {process} lets it end" if state == "stopped" else ""
    return f"{noun} {number} is PID {process} on {host}{lives}"
