"""Record the steps of a process that shares its mesh with no other process, if records are kept.

No other process waits for it, and XLA reports devices that wait for each other. Without
`COMMPLAN_KEEP_RECORDS` no calls are counted, and a step is called directly.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

from commplan.lowering.mpi.job.watchdog import job, main_stack
from commplan.recorder.file import is_kept, start_recording
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.interruption import print_stderr

_TICK_S = 0.004  # Seconds between two observations: the most that a recorded end of a step is late.
# The calls of each mesh, with the `bound_s` of `start`. A forked child records none.
_watched: list[tuple[Calls, float | None]] = []
os.register_at_fork(after_in_child=_watched.clear)


def start(plan: str, bound_s: float | None) -> Calls | None:
    """Record the calls of this process; returns None if no record is kept.

    Args:
        plan: The name of the plan, for the record.
        bound_s: Seconds after which a call is reported once on standard error; for steps that have run a few
            times only after several median intervals, see `Calls.usual_s`. None: no step is reported.
    """
    recording = start_recording(job(), plan, 0, 1) if is_kept() else None
    if recording is None:
        return None
    calls = Calls((0,), recording)
    _watched.append((calls, bound_s))
    if len(_watched) == 1:
        atexit.register(_end)
        threading.Thread(target=_run, name="commplan-recorder", daemon=True).start()
    return calls


def _run() -> None:
    """Observe the calls of all meshes until the process ends."""
    reported_calls: dict[int, int] = {}
    while _watched:
        time.sleep(_TICK_S)
        for index, (calls, bound_s) in enumerate(tuple(_watched)):
            calls.observe()
            report_overdue(index, calls, bound_s, reported_calls)


def report_overdue(index: int, calls: Calls, bound_s: float | None, reported_calls: dict[int, int]) -> None:
    """Report a call that has not ended for too long, once.

    Args:
        index: The index of `calls` among the watched ones.
        calls: The calls of one mesh.
        bound_s: See `start`.
        reported_calls: By index, the number of the call that was reported last; updated.
    """
    if bound_s is None or not calls.waits or reported_calls.get(index) == calls.waits:
        return
    idle = time.monotonic() - calls.moved
    if idle > calls.usual_s(bound_s):
        reported_calls[index] = calls.waits
        text = f"commplan: {calls.current()} has not ended for {idle:.0f} s; Python: {main_stack()}"
        print_stderr(text)


def _end() -> None:
    """Record the end of the last call of each mesh at exit, and remove records without calls."""
    for calls, _ in _watched:
        calls.observe()
        if calls.recording is not None and not calls.number:
            calls.recording.path.unlink(missing_ok=True)
