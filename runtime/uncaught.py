"""An exception that nobody catches ends the whole job where other ranks would wait for this one for ever.

MPI itself waits at the exit of the rank that failed, and the others in their next collective. `python -m
mpi4py` ends them all; so does this, for programs that are started without it. Either way what is printed says
once what the engine could not carry out.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from commplan.ir import schedule as ir
from commplan.lowering.mpi.undone import once
from commplan.lowering.mpi.untyped import MPI

_TOLD = "commplan_told"
_watching: list[Any] = []
_awaited: list[bool] = []


def watch(schedule: ir.Schedule, *, serves: bool) -> None:
    """From now on; the job ends if this rank is awaited: in collectives of the schedule, by those who share
    what it loads, or as its server.

    What a worker alone asks of servers keeps nobody waiting: at its exit they learn that it has left. Nor
    does a load that goes on without those who left (`on_failure = continue`).
    """
    if int(MPI.COMM_WORLD.Get_size()) == 1:
        return
    if serves or any(_awaits(phase) for phase in schedule.phases):
        _awaited.append(True)
    if not _watching:
        _watching.append(sys.excepthook)
        sys.excepthook = _uncaught


def _awaits(phase: ir.Phase) -> bool:
    goes_on = any(isinstance(op, ir.Read) and op.hints.on_failure == "continue" for op in phase.ops)
    return any(
        isinstance(op, ir.Collective) or (isinstance(op, ir.Share) and not goes_on) for op in phase.ops
    )


def told(error: BaseException) -> None:
    """Whoever waits for this rank has been told of `error`, and can say so itself."""
    setattr(error, _TOLD, True)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    once(error)
    _watching[0](kind, error, trace)
    if not _awaited or getattr(error, _TOLD, False) or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]
            stream.flush()
    MPI.COMM_WORLD.Abort(1)
