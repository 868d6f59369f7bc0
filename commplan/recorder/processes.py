"""How processes of this machine are, as the kernel says it."""

from __future__ import annotations

import contextlib
from pathlib import Path

WATCH_THREAD = "commplan-watch"  # answers for its process: `runtime/observe/watchdog.py`, `watch.h`
_STATES = {"T": "stopped", "t": "stopped", "D": "stuck in the kernel", "Z": "dead", "X": "dead"}


def process_state(number: int) -> str:
    """Of a process: `alive`, `stopped`, `stuck in the kernel` or `dead`."""
    try:
        return _STATES.get(_letter(Path(f"/proc/{number}")), "alive")
    except OSError:
        return "dead"


def waits_for_core(number: int) -> bool:
    """Whether the thread that answers for a process could run, and does not yet: on a busy machine that may
    take seconds."""
    for thread in Path("/proc").glob(f"{number}/task/*"):
        with contextlib.suppress(OSError):  # threads come and go meanwhile
            if (thread / "comm").read_text("utf-8", "replace").rstrip("\n") == WATCH_THREAD:
                return _letter(thread) == "R"
    return False


def _letter(folder: Path) -> str:
    """The state of a process or a thread. folder: that of `/proc`."""
    return (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
