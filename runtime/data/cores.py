"""What this process may run on."""

from __future__ import annotations

import os


def cores_of() -> set[int]:
    """The numbers of the cores that this process may run on: all, where the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
