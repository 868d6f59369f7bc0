"""Doing something again whenever files change, until it is interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from commplan.cli.console import Console

PERIOD_S = 0.2  # between looks at the files


def watch(paths: Sequence[str], work: Callable[[], object], console: Console) -> NoReturn:
    """Call `work` at once and after every change of one of `paths`, until KeyboardInterrupt."""
    while True:
        seen = [_state(path) for path in paths]
        work()
        console.note(f"watching {', '.join(paths)}; Ctrl-C ends it")
        console.flush()
        sys.stderr.flush()
        while [_state(path) for path in paths] == seen:
            time.sleep(PERIOD_S)


def _state(path: str) -> tuple[int, int, int] | None:
    """What changes with a file's contents; None for one that is not there (an editor may be replacing it)."""
    try:
        stat = Path(path).stat()
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
