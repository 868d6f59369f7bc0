"""States of processes of this machine according to the kernel, and their texts in messages."""

from __future__ import annotations

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
_IN_WORDS = {
    "dead": "has died",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "stuck in the kernel": "is stuck in the kernel (a disk or a file system that does not answer)",
    "alive": "does not answer: its process lives, and its threads do not run",
}


def process_state(number: int) -> Condition:
    """Return `alive`, `stopped`, `stuck in the kernel` or `dead`."""
    try:
        text = Path(f"/proc/{number}/stat").read_text("utf-8", "replace")
    except OSError:
        return "dead"
    return _STATES.get(text.rpartition(")")[2].split()[0], "alive")


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
