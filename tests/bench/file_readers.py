"""Correct and faulty readers of files. `bench.files` forks, so they run in a separate process.

python file_readers.py FOLDER   # prints the campaign's verdict on each, as JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench.files import __main__ as files
from bench.files.formats import Format
from commplan.diagnostics import fail


def outside(path: Path) -> int:
    (path.parent.parent / "canary").write_text("written")
    return 0


def large(path: Path) -> int:
    del path
    return len(bytearray(2 * files.MEMORY)) * 0


def endless(path: Path) -> int:
    del path
    os.kill(os.getpid(), signal.SIGXCPU)
    return 0


READERS: dict[str, Callable[[Path], int]] = {
    "accepts": lambda _: 0,
    "refuses": lambda _: fail("CP0001", "no"),
    "raises": lambda _: 1 // 0,
    "writes outside": outside,
    "takes memory": large,
    "takes time": endless,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outcomes = {
        name: files.run_case(Format("a", lambda: (b"text",), reader), "seed", folder)
        for name, reader in READERS.items()
    }
    print(json.dumps({name: [outcome.kind, outcome.text] for name, outcome in outcomes.items()}))
