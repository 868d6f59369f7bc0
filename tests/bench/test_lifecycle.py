"""Starts and stops of sharing processes, many of them killed: a slice of `bench.lifecycle`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_starts_and_stops_leave_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.lifecycle", "--count", "16", "--seed", "7", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and found["starts"] == 16
    assert found["kills"] >= found["starts with a kill"] > 0
