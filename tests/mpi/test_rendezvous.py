"""A rank that does not reach bind, compile, share or measure is named by all others, and the job ends."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support import mpirun
from support.campaign import parameters

from bench.harness.mpirun import ULFM

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "rendezvous_worker.py"
PURPOSES = {
    "bind": "bind plan `p`",
    "inside": "bind plan `p`",
    "compile": "compile plan `p`",
    "batches": "share the data that they load",
    "calibrate": "be measured",
    "rehearse": "rehearse the plan",
}


def job(where: str, how: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Sleeping ranks are forked: they inherit the environment, so others cannot find them by it."""
    command = mpirun.command(3, WORKER, where, how, forked=how in ("sleep", "late"))
    return mpirun.started([command[0], *options, *command[1:]])


@pytest.mark.parametrize(
    ("where", "how", "options"),
    parameters(
        [
            ("inside", "stop", ULFM),
            ("bind", "caught", []),
            ("calibrate", "stop", []),
            *((where, "sleep", []) for where in ("compile", "batches", "rehearse")),
        ],
        [
            *((where, "stop", []) for where in PURPOSES if where != "calibrate"),
            ("bind", "stop", ULFM),
            ("bind", "sleep", []),
        ],
    ),
)
def test_who_does_not_come_is_named_on_all_others(where: str, how: str, options: list[str]):
    done = job(where, how, *options)
    assert done.returncode != 0
    process = {
        "stop": r"\(process \d+ on .*\) is stopped",
        "caught": r"\(process \d+ on .*\) is alive",
        "sleep": "has no process on the hosts of the other ranks: .*",
    }[how]
    pattern = (
        rf"rank (\d) raised error\[CP0849\].*: rank 1 has not joined the call to {PURPOSES[where]}"
        rf" within \d+ s\n"
        rf" *note: rank 1 {process}\n"
    )
    raised = sorted(re.findall(pattern, done.stdout))
    # MPI continues a stopped process before it ends it, and sometimes it then prints its messages, too.
    assert [rank for rank in raised if rank != "1"] == ["0", "2"], done.stdout + done.stderr
    assert done.stdout.count(" raised ") == len(raised), done.stdout


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("bind", "`program.bind` of `p`"),
        ("guard", "`guard.jit` of `<lambda>`"),
        ("compile", "`plan.compile` of `p`"),
    ],
)
def test_a_late_rank_is_reported_once_and_waited_for(where: str, call: str):
    done = job(where, "late")
    assert mpirun.ended_well(done).count("is done") == 3
    notices = re.findall(r"commplan: (.*) within \d+ s\nnote: (.*)\n", done.stderr)
    assert notices == [("rank 1 has not arrived", f"rank 0 waits in {call}")], done.stderr
