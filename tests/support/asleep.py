"""Seeing from outside that a process waits."""

from __future__ import annotations

import time
from pathlib import Path

LOOKS, APART_S = 5, 0.01


def until_asleep(pid: int) -> None:
    """Return once the main thread of `pid` was asleep several times in a row: it waits, and does not just
    pause."""
    until, sightings = time.monotonic() + 120, 0
    while sightings < LOOKS:
        assert time.monotonic() < until, f"process {pid} never waits"
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        sightings = sightings + 1 if state == "S" else 0
        time.sleep(APART_S)
