"""Reads the Python stacks of a process of this host from outside.

This also works if a thread is in C and holds the interpreter's lock, so that no Python thread can run.
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

_FRAMES, _MOST = 6, io.MIB  # maximum number of frames, the innermost ones; of bytes of all stacks
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Timeout of the stacks, seconds between polls, and number of polls without new text at the end.
_WAIT_S, _POLL_S, _SETTLED = 2.0, 0.05, 3


def stacks(record: Path) -> list[list[str]]:
    """The Python stack of each thread of the process that writes `record`, innermost frame first.

    The main thread is first. Empty if the process does not run, or does not write its stacks.
    """
    try:
        process, number = writer(record)
        # The number may belong to another process by now, which the signal would end.
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
    """Send a signal to the main thread, whose number is that of the process.

    A second signal to the process at the same time would go to another thread, whose stack would be taken for
    that of the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):  # glibc before 2.30
        os.kill(process, number)
    elif libc.tgkill(process, process, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def main_stack(record: Path) -> str:
    """The stack of the main thread, in a line; empty if the process does not write it."""
    threads = stacks(record)
    return shown(threads[0]) if threads else ""


def shown(frames: Sequence[str]) -> str:
    """The innermost frames of the user's program, in a line; of all code if there are none."""
    return ", from ".join(([frame for frame in frames if is_users(frame)] or frames)[:_FRAMES])


def own_frames() -> list[str]:
    """The frames of the main thread of this process, innermost first."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame, lines = frames.get(threading.main_thread().ident or 0), list[str]()
    while frame is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def user_line() -> str:
    """The innermost line of the user's program in the main thread of this process; empty if there is none."""
    return next(filter(is_users, own_frames()), "")


def _mapped(process: int) -> set[Path]:
    """The records that a process writes. It appends its stacks to the newest of them."""
    lines = Path(f"/proc/{process}/maps").read_text("utf-8", "replace").splitlines()
    return {Path(line[line.index("/") :]) for line in lines if line.endswith(".rec") and "/" in line}


def _written(begins: Mapping[Path, int]) -> str:
    """The text that the process appends to one of the records, once it is complete."""
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
    threads: list[tuple[bool, list[str]]] = []  # sort key: the main thread takes the signal, and is `Current`
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if "hread 0x" in line and frame is None:
            threads.append((not line.startswith("Current"), []))
        elif frame is not None and threads:
            threads[-1][1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    return [frames for _, frames in sorted(threads, key=lambda thread: thread[0])]
