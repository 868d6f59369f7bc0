"""The input of a run under MPI in its records: waits between ranks, and calls that do not return."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import mpirun

from commplan.cli import main
from commplan.recorder.blame import blame
from commplan.recorder.collectives import read_run
from commplan.recorder.reading import read_records
from commplan.recorder.summary import summary
from commplan.recorder.tasks import last_makes
from commplan.recorder.trace import trace

mpirun.needs_mpi()

PLAN = """plan fed
ensemble member = 3
source images : u8[6]
fn decode(u8[6]) -> u8[2, 3] on host
input loss : f32 per member
each step {
    raw  = load images batch 6 visit exactly_once seed 3 tail short
    x    = map decode(raw)
    x    = share x over member via all_shared
    loss = reduce loss across member by mean
    output x, loss
}
"""
PROGRAM = """
import sys, time
import jax, numpy as np
from mpi4py import MPI
import commplan
comm = MPI.COMM_WORLD
calls = 0
def decode(raw):
    global calls
    calls += 1
    if comm.rank == 1 and calls > 12:
        time.sleep(600)
    return raw.reshape(2, 3)
images = [np.full(6, number, np.uint8) for number in range(60)]
program = commplan.load(sys.argv[1]).compile(comm, shapes={"loss": jax.ShapeDtypeStruct((), "float32")})
run = program.bind(comm, sources={"images": images}, functions={"decode": decode})
state = run.init()
step = jax.jit(lambda state: run.step(state, loss=np.float32(1)))
for batch in run.batches(timeout=4):
    out, state = step(state)
    jax.block_until_ready(out)
"""


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The records and the output of three ranks; rank 1 does not finish the eighth batch."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "fed.plan").write_text(PLAN)
    with mock.patch.dict(os.environ, COMMPLAN_RECORDS=str(folder)):
        done = mpirun.started(mpirun.command(3, PROGRAM, folder / "fed.plan", forked=False), 120)
    assert done.returncode != 0
    return folder, done.stderr


def test_who_waits_says_in_which_call_the_other_is(stuck: tuple[Path, str]):
    _, output = stuck
    assert "CP0921" in output
    assert re.search(
        r"process 1 is in host function `decode`, on record \d+, for \d\.\d s; its Python: <string>:\d+ in",
        output,
    )


def test_blame_follows_waits_for_input(stuck: tuple[Path, str], capsys: pytest.CaptureFixture[str]):
    folder, _ = stuck
    verdict = blame(read_records([str(folder)]))
    assert list(verdict.holders) == [1]
    assert verdict.holders[1].startswith("it has not made its part of batch 8 of line 9 of ")
    assert "it is in host function `decode`, on record" in verdict.holders[1]
    (activity,) = verdict.ranks[0].activities
    assert activity.waits is not None and activity.waits.runs == 8
    assert activity.progress is not None and activity.progress.rank == 1
    assert verdict.ranks[0].waits is None  # it has not come to the collective of this step
    assert main(["blame", str(folder), "--format", "json"]) == 1
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    (makes,) = shown["ranks"][1]["activities"]
    assert makes["makes"]["run"] == 8 and "`decode`" in makes["call"]["text"]
    assert main(["blame", str(folder)]) == 1
    assert "rank 1 blocks the others: it has not made its part of batch 8" in capsys.readouterr().out


def test_the_trace_has_a_track_for_input_with_arrows(stuck: tuple[Path, str]):
    folder, _ = stuck
    run = read_run(read_records([str(folder)]))
    waits = [task for task in run.tasks if task.kind == "wait"]
    assert {(task.rank, task.number) for task in waits} == {(r, n) for r in range(3) for n in range(1, 9)}
    assert all(wait.number == make.number and wait.rank != make.rank for wait, make in last_makes(run.tasks))
    events: list[dict[str, Any]] = json.loads(trace(run))["traceEvents"]
    named = {(each["pid"], each["args"]["name"]) for each in events if each["ph"] == "M"}
    assert {(rank, "input: waits") for rank in range(3)} <= named
    assert (1, "input: makes") in named
    makes = [each for each in events if each.get("cat") == "input" and "make batch" in each["name"]]
    (hanging,) = [each for each in makes if (each["pid"], each["args"]["step"]) == (1, 7)]
    assert hanging["args"]["state"] == "unfinished" and hanging["dur"] > 3e6
    arrows = [each for each in events if each["ph"] in "sf" and each["name"] == "made"]
    assert len(arrows) == 2 * len(list(last_makes(run.tasks)))
    (waited,) = summary(run).waits
    assert (waited.lane, waited.line, waited.count, waited.unfinished) == ("input", 9, 24, 3)
    assert waited.share > 0.5 and waited.making < 1
