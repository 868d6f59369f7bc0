"""A rank that fails ends the whole job where other ranks would wait for it for ever.

MPI itself waits at the exit of the rank that failed, and the others in their next collective. `python -m
mpi4py` ends them all; so does this, for programs that are started without it: after an exception that nobody
catches, and after `sys.exit` with a code. Either way what is printed says once what the engine could not
carry out.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

from commplan.ir import schedule as ir
from commplan.lowering.mpi.engine_errors import once
from commplan.lowering.mpi.rendezvous import TOLD
from commplan.lowering.mpi.typing_shim import MPI

_watching: list[Any] = []
_awaited: list[bool] = []
_exempt: list[bool] = []
os.register_at_fork(after_in_child=_awaited.clear)


def watch(schedule: ir.Schedule, *, serves: bool) -> None:
    """From now on; the job ends if this rank is awaited: in collectives of the schedule, by those who share
    what it loads, or as its server.

    What a worker alone asks of servers keeps nobody waiting: at its exit they learn that it has left. Nor
    does a load that goes on without those who left (`on_failure = continue`).
    """
    if _exempt or int(MPI.COMM_WORLD.Get_size()) == 1:
        return
    if serves or any(_awaits(phase) for phase in schedule.phases):
        _awaited.append(True)
    if not _watching:
        _watching.append(sys.excepthook)
        sys.excepthook = _uncaught
        sys.exit = _exit


def exempt() -> None:
    """This process tells the others itself how it ends, whatever happens, as the command does."""
    _exempt.append(True)


def _awaits(phase: ir.Phase) -> bool:
    goes_on = any(isinstance(op, ir.Read) and op.hints.on_failure == "continue" for op in phase.ops)
    return any(
        isinstance(op, ir.Collective) or (isinstance(op, ir.Share) and not goes_on) for op in phase.ops
    )


def told(error: BaseException) -> None:
    """Whoever waits for this rank has been told of `error`, and can say so itself."""
    setattr(error, TOLD, True)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    once(error)
    _watching[0](kind, error, trace)
    _end(error, 1)


class _Exit(SystemExit):
    """What `sys.exit` raises: `SystemExit` goes past `sys.excepthook`, but when nobody has caught one, Python
    itself reads its code, the only reader that no function has called."""

    @property
    def code(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        status = self.args[0] if self.args else None
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            _exiting(self, status)
        return status

    @code.setter
    def code(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.args = (value,)


def _exit(status: Any = None, /) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    raise SystemExit(status)  # ends this thread alone, which `threading` passes over for no other class


def _exiting(error: SystemExit, code: object) -> None:
    if isinstance(code, int):
        _end(error, code & 0xFF)
    elif code is not None and _awaited:
        print(code, file=sys.stderr)
        _end(error, 1)


def _end(error: BaseException, status: int) -> None:
    if not (status and _awaited) or getattr(error, TOLD, False):
        return
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]
            stream.flush()
    MPI.COMM_WORLD.Abort(status)
