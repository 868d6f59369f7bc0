"""The PID of this process, for comparison after a fork, and the cores that it may run on.

The PID is cached: the system call takes longer than the rest of handing out a batch.
"""

from __future__ import annotations

import os

pid = os.getpid()


def _forked() -> None:
    global pid  # noqa: PLW0603
    pid = os.getpid()


def cores_of() -> set[int]:
    """The numbers of the cores that this process may run on; all if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
