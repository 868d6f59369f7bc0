"""Reads the Python stacks of another process of this host, or of the main thread of this one.

`stacks` sends `file.SIGNAL` to the other process, whose handler appends the stacks to its record. This also
works if a thread of that process is in C and holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from commplan import io
from commplan.recorder.file import SIZE
from commplan.recorder.processes import process_state
from commplan.recorder.reading import writer
from commplan.tracebacks import is_users

_FRAMES = 6  # maximum number of frames in a line, the innermost ones
_MOST = io.MIB  # maximum bytes of the stacks that are read from a record
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # a frame as faulthandler writes it
_WAIT_S = 2.0  # seconds for the process to write its stacks
_POLL_S = 0.05  # seconds between two polls of the size of its records
_SETTLED = 3  # number of polls without new text after which the stacks are complete


def stacks(record: Path) -> list[list[str]]:
    """The Python stack of each thread of the process that writes `record`.

    Returns:
        For each thread, the main thread first, its frames as `FILE:LINE in FUNCTION`, innermost first. Empty
        if the process does not run on this host, or does not write its stacks within `_WAIT_S`.
    """
    try:
        process, number = writer(record)
        # The process number may have been reused. The signal would end another process.
        if number <= 0 or process_state(process) != "alive":
            return []
        sizes = {path: path.stat().st_size for path in _mapped(process)}
        if record.resolve() not in sizes:
            return []
        _signal(process, number)
        return _parsed(_written(sizes))
    except OSError:
        return []


def _signal(process: int, number: int) -> None:
    """Send a signal to the main thread, whose number is that of the process. Raises OSError.

    The kernel may deliver a signal to the process on any thread, if another signal is sent at the same time.
    The stack of this thread would be mistaken for that of the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):  # glibc before 2.30
        os.kill(process, number)
    elif libc.tgkill(process, process, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def main_stack(record: Path) -> str:
    """The stack of the main thread of the process that writes `record`, see `shown`; empty if unknown."""
    threads = stacks(record)
    return shown(threads[0]) if threads else ""


def shown(frames: Sequence[str]) -> str:
    """The `_FRAMES` innermost frames of the user's program in one line.

    If no frame is of the user's program, the innermost of all frames. Empty without frames.
    """
    return ", from ".join(([frame for frame in frames if is_users(frame)] or frames)[:_FRAMES])


def own_frames() -> list[str]:
    """The frames of the main thread of this process as `FILE:LINE in FUNCTION`, innermost first."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame, lines = frames.get(threading.main_thread().ident or 0), list[str]()
    while frame is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def user_line() -> str:
    """The innermost frame of the user's program in the main thread of this process; empty if it has none."""
    return next(filter(is_users, own_frames()), "")


def _mapped(process: int) -> set[Path]:
    """The records that a process maps. It appends its stacks to one of them."""
    lines = Path(f"/proc/{process}/maps").read_text("utf-8", "replace").splitlines()
    return {Path(line[line.index("/") :]) for line in lines if line.endswith(".rec") and "/" in line}


def _written(begins: Mapping[Path, int]) -> str:
    """Wait until the process has appended its stacks to one of the records, and return this text.

    Args:
        begins: The size of each record before the signal, in bytes.
    """
    sizes, polls, until = dict(begins), 0, time.monotonic() + _WAIT_S
    while polls < _SETTLED and time.monotonic() < until:
        time.sleep(_POLL_S)
        before, sizes = sizes, {path: path.stat().st_size for path in begins}
        polls = polls + 1 if sizes == before != begins else 0
    texts: list[str] = []
    for path, begin in begins.items():
        descriptor = io.open_file(path)
        try:
            texts.append(os.pread(descriptor, _MOST, max(begin, SIZE)).decode(errors="replace"))
        finally:
            os.close(descriptor)
    return "".join(texts)


def _parsed(text: str) -> list[list[str]]:
    """The frames of each thread in the output of faulthandler, the main thread first."""
    # Each thread with a sort key. The main thread, which handles the signal, is called `Current thread`.
    threads: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if "hread 0x" in line and frame is None:
            threads.append((not line.startswith("Current"), []))
        elif frame is not None and threads:
            threads[-1][1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    return [frames for _, frames in sorted(threads, key=lambda thread: thread[0])]
