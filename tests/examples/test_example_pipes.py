"""Examples whose output is closed early, as with `| head`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support import interpreter

EXAMPLE = Path(__file__).parents[2] / "examples" / "ensemble_processes.py"
# The example, with members that print without end instead of training.
LAUNCHER = """
import pathlib, sys
path, member = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
sys.path.insert(0, str(path.parent))
exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__", "__file__": member})
"""
MEMBER = "import time\nwhile True:\n    print('a line', flush=True)\n    time.sleep(0.05)\n"


def test_a_reader_that_leaves_ends_the_members_without_a_traceback(tmp_path: Path):
    member = tmp_path / "member.py"
    member.write_text(MEMBER)
    command = [*interpreter.words(), "-c", LAUNCHER, str(EXAMPLE), str(member), "--epochs", "1"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    errors = started.stderr.read()
    started.stderr.close()
    assert started.wait(timeout=280) == 141
    assert "Traceback" not in errors and "BrokenPipe" not in errors, errors
