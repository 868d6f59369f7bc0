"""End the whole job if a process fails and the others would wait for it forever.

Under MPI a failing rank waits at exit for the other ranks, and they wait for it in their next collective.
Processes under `jax.distributed` hang in the same way. `python -m mpi4py` ends the job in this case. This
module does the same at exit, after an uncaught exception, and replaces nothing of the process by default.
`install_hooks` adds more: the job also ends after `sys.exit` with a code other than 0. Errors that all
processes raise are printed whole once. Aborts by JAX are delayed to print a verdict first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import inspect
import os
import signal
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from commplan.diagnostics import CommplanError
from commplan.ir import schedule as ir
from commplan.lowering.mpi.job.engine_errors import IS_REPORTED, once
from commplan.lowering.mpi.job.interruption import interruption
from commplan.recorder.file import offer_stacks_of_process, uncaught
from commplan.runtime.observe import interruption as interruption_watch
from commplan.sidecar import leave
from commplan.tracebacks import from_users_code

# An attribute of errors that another process prints whole: the line that this process prints.
_REPEATS = "commplan_repeats"
# An attribute of errors: whether every process raises it.
_COMMON = "commplan_common"
# The codes that comparisons raise on all processes.
_COMPARED = ("CP0845", "CP0854", "CP0856", "CP0861")
# Seconds that this process waits before it ends the job, so that another one prints the whole message first.
_FIRST_S = 1.0
# The most seconds that an aborting rank waits for the launcher to read its output.
_READ_S = 1.0
# Seconds between two queries whether the output was read.
_POLL_S = 0.005

# The previous `sys.excepthook`, if hooks are installed.
_hooks: list[Any] = []
# The functions that `on_failure` registered. A forked child ends no job.
_ends: list[Callable[[BaseException, int], None]] = []
# Not empty after `exempt`.
_exempt: list[bool] = []
os.register_at_fork(after_in_child=_ends.clear)


@contextlib.contextmanager
def report_once(noun: str, number: int, first: int) -> Generator[None]:
    """Let only process `first` print the whole message of an error that all processes raise in this block.

    The other processes print one line. `mark_common` marks errors that all processes raise; of the others,
    those count that have the code of a comparison. Has no effect without hooks.

    Args:
        noun: The noun for a process in messages, such as `rank`.
        number: The number of this process.
        first: The number of the process that prints the whole message.
    """
    try:
        yield
    except CommplanError as error:
        if number != first and getattr(error, _COMMON, error.diagnostics[0].code in _COMPARED):
            line = str(error).splitlines()[0]
            setattr(error, _REPEATS, f"{noun} {number}: {line} ({noun} {first} prints the whole message)")
        raise


def mark_common(error: Exception, *, is_common: bool = True) -> None:
    """Mark whether every process raises `error`; see `report_once`."""
    setattr(error, _COMMON, is_common)


def on_failure(end: Callable[[BaseException, int], None]) -> None:
    """Call `end` at exit with the uncaught exception of this process and status 1.

    With hooks, `end` is also called with the exception of `sys.exit` and its code. Exit handlers that are
    registered later run earlier.
    """
    if end not in _ends:
        _ends.append(end)
    atexit.unregister(_exiting_with)
    atexit.register(_exiting_with)


def _exiting_with() -> None:
    """Handle an uncaught exception at exit. With hooks, `_uncaught` has done it."""
    if (error := uncaught()) is not None and not _hooks:
        _end(error, 1)


def install_hooks() -> None:
    """Install hooks in this process that end a failing job sooner and explain more; call it before `bind`.

    By default commplan replaces and installs nothing process-wide. The hooks are:

    - `sys.exit`: a code other than 0 ends the job of this process.
    - `sys.excepthook`: an error that all processes raise is printed whole by the first one alone, and an
      error of the MPI engine that is due to Ctrl-C becomes `KeyboardInterrupt`.
    - The handler of SIGABRT: an abort by JAX or Gloo waits six seconds for the watchdog to find the cause.
    - The wake-up descriptor of signals: Ctrl-C ends a process whose main thread waits for a device.
    - The handler of `SIGRTMIN + 11`, by `faulthandler`: other processes can show the Python stack of this one
      while it holds the interpreter's lock.

    A handler or descriptor that the program has installed itself is kept; its own `sys.excepthook` is called.
    """
    if not _hooks:
        _hooks.append(sys.excepthook)
        sys.excepthook = _uncaught
        sys.exit = _exit
        _hold_aborts()
        interruption_watch.install()
        offer_stacks_of_process()


def watch(schedule: ir.Schedule, ranks: int, *, serves: bool) -> None:
    """End the MPI job if this rank fails and other ranks would wait for it.

    Ranks wait for each other in the collectives and shared loads of the schedule, and workers wait for
    servers. Two cases end no job: servers do not wait for a worker, which notifies them at exit, and a
    shared load with `on_failure = continue` goes on without the ranks that left.

    Args:
        schedule: The schedule of a program that this process binds.
        ranks: The number of ranks of the job.
        serves: Whether this rank is a server.
    """
    if _exempt or ranks == 1:
        return
    if serves or any(_awaits(phase) for phase in schedule.phases):
        on_failure(_abort)


def exempt() -> None:
    """Disable `watch`: this process always reports its end to the others, as the command does."""
    _exempt.append(True)


def _awaits(phase: ir.Phase) -> bool:
    """Whether a rank that runs `phase` waits for other ranks, and would do so forever if one fails."""
    goes_on = any(isinstance(op, ir.Read) and op.hints.on_failure == "continue" for op in phase.ops)
    return any(
        isinstance(op, ir.Collective) or (isinstance(op, ir.Share) and not goes_on) for op in phase.ops
    )


def mark_reported(error: BaseException) -> None:
    """Mark `error` as reported: the ranks that wait for this one have received it, and print it."""
    setattr(error, IS_REPORTED, True)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error and end the job. The arguments are those of `sys.excepthook`."""
    if (cause := interruption(error)) is not None:
        kind, error = type(cause), cause
    once(error)
    if isinstance(error, CommplanError):
        trace = error.__traceback__ = from_users_code(error)
    if repeats := getattr(error, _REPEATS, ""):
        print(repeats, file=sys.stderr, flush=True)
        time.sleep(_FIRST_S)
    else:
        _hooks[0](kind, error, trace)
    _end(error, 1)


class _Exit(SystemExit):
    """The exception of `sys.exit`, which detects that it ends the process.

    `SystemExit` does not reach `sys.excepthook`. If it is not caught, the interpreter reads the attribute
    `code`. Only this read has no calling frame.
    """

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
    """The replacement of `sys.exit`."""
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    raise SystemExit(status)  # Ends only this thread; `threading` ignores exactly this class.


def _exiting(error: SystemExit, code: object) -> None:
    """End the job as the interpreter ends the process: with an integer code, or 1 after printing another."""
    if isinstance(code, int):
        _end(error, code & 0xFF)
    elif code is not None and _ends:
        print(code, file=sys.stderr)
        _end(error, 1)


def _end(error: BaseException, status: int) -> None:
    """Call the registered functions, unless `status` is 0 or the other processes have received `error`."""
    if not (status and _ends) or getattr(error, IS_REPORTED, False):
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]
            stream.flush()
    for end in _ends:
        end(error, status)


def _abort(_: BaseException, status: int) -> None:
    """End the MPI job after the launcher has read the output, which is lost otherwise, or after a second."""
    from mpi4py import MPI  # noqa: PLC0415  only under MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        leave(aborts=True)
        deadline = time.monotonic() + _READ_S
        while any(map(unread, (1, 2))) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        MPI.COMM_WORLD.Abort(status)


def unread(descriptor: int) -> int:
    """The number of unread bytes in the pipe `descriptor`; 0 if it is no pipe, or is closed."""
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    except OSError:
        pass
    return 0


def _hold_aborts() -> None:
    """Delay `abort` by six seconds, so that the watchdog can find the cause.

    Keeps a handler that is installed already, such as that of `faulthandler`.

    The handler is the C function `sleep`, which receives the number of SIGABRT, 6. A handler of Python would
    return at once, and Python code might wait for a lock that the aborting thread holds.
    """
    library = ctypes.CDLL(None)
    library.signal.restype, library.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
    if before:
        library.signal(signal.SIGABRT, before)


def aborted() -> bool:
    """Whether a thread of this process sleeps in the handler of SIGABRT.

    In the handler only this signal is blocked. All signals are blocked while a thread is created.
    """
    if not _hooks:
        return False
    abort_bit, term_bit = 1 << (signal.SIGABRT - 1), 1 << (signal.SIGTERM - 1)
    for status in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):
            mask = status.read_text("ascii", "replace").partition("SigBlk:")[2].split(maxsplit=1)[0]
            if int(mask, 16) & (abort_bit | term_bit) == abort_bit:
                return True
    return False
