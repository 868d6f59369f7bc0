"""Ctrl-C ends a rank that waits for another one, and with it the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support import mpirun
from support.asleep import until_asleep

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "interrupted_worker.py"


@pytest.mark.parametrize("where", ["bind", "step"])
def test_an_interrupt_ends_every_wait_for_a_rank(where: str):
    with subprocess.Popen(
        mpirun.command(2, WORKER, where),
        env=mpirun.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None
            waits = next(match for line in job.stdout if (match := re.match(r"waits as (\d+)", line)))
            pid = int(waits[1])
            until_asleep(pid)
            os.kill(pid, signal.SIGINT)
            output, _ = job.communicate(timeout=120)
        finally:
            job.kill()
    assert job.returncode != 0
    assert "KeyboardInterrupt" in output, output
