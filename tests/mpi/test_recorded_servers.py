"""Requests to servers in the records of a run: sent, served, answered, and the rank that blocks."""

from __future__ import annotations

import json
import os
import re
from typing import Any
from unittest import mock

import pytest
from support import mpirun

from commplan.recorder.blame import blame
from commplan.recorder.collectives import read_run
from commplan.recorder.file import Record
from commplan.recorder.reading import read_records
from commplan.recorder.summary import summary
from commplan.recorder.tasks import links
from commplan.recorder.trace import trace

mpirun.needs_mpi()

PROGRAM = """
import os, signal, sys
import jax, numpy as np
from mpi4py import MPI
import commplan
comm = MPI.COMM_WORLD
pids = comm.allgather(os.getpid())
text = '''
plan exchanging
axis worker = ?
server hub = 1
input params : f32[3000] per worker
input grads : f32[3000] partial worker
state weights : f32[3000] on hub
fn add(f32[3000], f32[3000]) -> f32[3000] on device elementwise
at start {
    weights = broadcast params over worker from 0
}
each step {
    weights = exchange grads into weights with add over worker by sum { chunk = 4 KiB }
    output weights
}
'''
program = commplan.loads(text).compile(comm)
run = program.bind(comm, functions={"add": lambda w, g: w + g}, watchdog_s=2)
if comm.rank == 2:
    sys.exit(run.serve() and 0)
x = np.ones(3000, np.float32)
_, state = run.start(run.init(), params=x)
step = jax.jit(lambda state, grads: run.step(state, grads=grads))
for number in range(8):
    if number == 5 and comm.rank == 1:
        os.kill(pids[2], signal.SIGSTOP)
    out, state = step(state, x)
    jax.block_until_ready(out)
run.close()
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Record], str]:
    """The records of two workers and their server, which is stopped before the sixth step."""
    folder = tmp_path_factory.mktemp("run")
    with mock.patch.dict(os.environ, COMMPLAN_RECORDS=str(folder)):
        done = mpirun.started(mpirun.command(3, PROGRAM), 120)
    assert done.returncode != 0
    return read_records([str(folder)]), done.stderr


def test_a_server_that_is_stopped_is_named_by_those_who_ask(stopped: tuple[list[Record], str]):
    records, output = stopped
    assert "rank 2 is stopped (SIGSTOP, or a debugger)" in output
    lanes = [(record.rank, record.lane) for record in records]
    assert lanes == [(0, ""), (0, "requests"), (1, ""), (1, "requests"), (2, "server")]
    verdict = blame(records)
    assert list(verdict.holders) == [2]  # by a watchdog's verdict, or otherwise by the requests
    assert re.match(r"it (is stopped|has not answered request 6 of line 13 of <plan>$)", verdict.holders[2])
    for rank in verdict.ranks[:2]:
        (activity,) = rank.activities
        assert activity.waits is not None and activity.waits.runs == 6
        assert activity.progress is not None and activity.progress.rank == 2
        assert rank.state == "ended" or rank.end.startswith("was ended")
    assert not verdict.ranks[2].collective


def test_requests_have_a_track_and_arrows_to_the_server_and_back(stopped: tuple[list[Record], str]):
    records, _ = stopped
    run = read_run(records)
    answered = [task for task in run.tasks if task.kind == "request" and not task.state]
    assert {(task.rank, task.line, task.number) for task in answered} == {
        (rank, line, number)
        for rank in (0, 1)
        for line in (10, 13)
        for number in range(1, 2 if line == 10 else 6)
    }
    serves = [task for task in run.tasks if task.kind == "serve" and not task.state]
    assert {(task.detail, task.line, task.number) for task in serves} >= {
        (task.rank, task.line, task.number) for task in answered
    }
    ways = [(link.source.kind, link.target.kind) for link in links(run.tasks)]
    assert ways.count(("request", "serve")) >= 10 and ways.count(("serve", "request")) >= 10
    events: list[dict[str, Any]] = json.loads(trace(run))["traceEvents"]
    named = {(each["pid"], each["args"]["name"]) for each in events if each["ph"] == "M"}
    assert {(0, "requests"), (1, "requests"), (2, "serves")} <= named
    first, later = summary(run).waits
    assert (first.line, first.count, later.line, later.count) == (10, 2, 13, 12)
    assert later.unfinished == 2 and later.making > 0
    assert summary(run).ranks == 3
