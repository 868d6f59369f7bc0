"""Ctrl-C ends a rank that waits for another one, and with it the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import mpirun
from support.asleep import until_asleep

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "interrupted_worker.py"


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("where", ["bind", "step", "exit", "launcher"])
def test_an_interrupt_ends_every_wait_for_a_rank(where: str):
    """That of a rank, or of `mpirun`, as the terminal of a job sends it."""
    with subprocess.Popen(
        mpirun.command(2, WORKER, where.replace("launcher", "step")),
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
            os.kill(job.pid if where == "launcher" else pid, signal.SIGINT)
            output, _ = job.communicate(timeout=240)
        finally:
            job.kill()
    assert job.returncode != 0
    if where == "launcher":
        assert "Traceback" not in output, output
        until_gone(pid)  # its parent may be about to wait for it
    else:
        assert ("Errorcode: 130" if where == "exit" else "KeyboardInterrupt") in output, output
