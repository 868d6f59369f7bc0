"""The last actions of an ending process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit
from commplan.ending import at_last
def broken():
    print("second")
    raise OSError("the disk is full")
at_last(lambda: print("last"))
at_last(broken)
at_last(lambda: print("first"))
atexit.register(print, "before")
"""


def test_one_that_raises_keeps_no_other_from_being_called():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["before", "first", "second", "last"]
    assert "OSError: the disk is full" in done.stderr
