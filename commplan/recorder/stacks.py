"""What a process of this host does in Python, told from outside: also where it is in C and keeps the
interpreter's lock, so that none of its own threads can say it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from commplan.recorder.blame import process_state
from commplan.recorder.file import SIZE, writer

_FRAMES = 6  # the innermost ones
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_WAIT_S, _POLL_S, _SETTLED = 2.0, 0.05, 3  # to wait for them; polls without a word more, which are the end


def stacks(record: Path) -> list[list[str]]:
    """The Python of each thread of the process that writes `record`, innermost frame first; the main thread
    first. Nothing where it does not run, or does not tell."""
    try:
        process, number = writer(record)
        # Its number may be another process's by now, which the signal would end.
        if number <= 0 or process_state(process) != "alive" or not _maps(process, record):
            return []
        begin = record.stat().st_size
        os.kill(process, number)
        return _parsed(_written(record, begin))
    except OSError:
        return []


def main_stack(record: Path) -> str:
    """What the main thread does, in a line; empty where that is not told."""
    threads = stacks(record)
    return shown(threads[0]) if threads else ""


def shown(frames: Sequence[str]) -> str:
    """The innermost frames, in a line."""
    return ", from ".join(frames[:_FRAMES])


def _maps(process: int, record: Path) -> bool:
    return str(record.resolve()) in Path(f"/proc/{process}/maps").read_text("utf-8", "replace")


def _written(record: Path, begin: int) -> str:
    """What is written to `record` from there on, once that has come to an end."""
    size, polls, until = begin, 0, time.monotonic() + _WAIT_S
    while polls < _SETTLED and time.monotonic() < until:
        time.sleep(_POLL_S)
        before, size = size, record.stat().st_size
        polls = polls + 1 if size == before > begin else 0
    with record.open("rb") as file:
        file.seek(max(begin, SIZE))
        return file.read().decode(errors="replace")


def _parsed(text: str) -> list[list[str]]:
    threads: list[tuple[bool, list[str]]] = []  # whether it took the signal, which the main thread does first
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if "hread 0x" in line and frame is None:
            threads.append((not line.startswith("Current"), []))
        elif frame is not None and threads:
            threads[-1][1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    return [frames for _, frames in sorted(threads, key=lambda thread: thread[0])]
