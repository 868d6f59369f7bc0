"""Repeat work whenever files change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from commplan.cli.console import Console

PERIOD_S = 0.2  # polling interval


def watch(paths: Sequence[str], work: Callable[[], object], console: Console) -> NoReturn:
    """Call `work` immediately and after every change of one of `paths`, until KeyboardInterrupt."""
    while True:
        states = [_state(path) for path in paths]
        work()
        console.note(f"watching {', '.join(paths)}; stop with Ctrl-C")
        console.flush()
        sys.stderr.flush()
        while [_state(path) for path in paths] == states:
            time.sleep(PERIOD_S)


def _state(path: str) -> tuple[int, int, int] | None:
    """Properties that change with a file's contents; None if it does not exist.

    An editor may be replacing the file.
    """
    try:
        stat = Path(path).stat()
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
