"""Examples whose output nobody reads to the end, as with `| head`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support import interpreter

EXAMPLE = Path(__file__).parents[2] / "examples" / "ensemble_processes.py"


def test_a_reader_that_leaves_ends_the_members_without_a_traceback():
    command = [*interpreter.words(), str(EXAMPLE), "--epochs", "1", "--records", "64"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    said = started.stderr.read()
    started.stderr.close()
    assert started.wait(timeout=280) == 141
    assert "Traceback" not in said and "BrokenPipe" not in said, said
