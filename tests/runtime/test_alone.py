"""A single process records its steps on request, and reports the step that does not end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from commplan.cli import main
from commplan.recorder.blame import blame
from commplan.recorder.collectives import read_run
from commplan.recorder.reading import read_records
from commplan.report.recorded import traces
from commplan.runtime.observe import alone
from commplan.runtime.observe.calls import Calls

PROGRAM = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import commplan
mesh = jax.make_mesh((2,), ("data",))
plan = commplan.load(sys.argv[1])
idle = plan.compile(mesh).bind(mesh)
run = plan.compile(mesh).bind(mesh, watchdog_s=0.2)

@run.jit
@run.spmd(x="split data", returns="same")
def train(state, x):
    out, state = run.step(state, grads=x)
    return state, out.grads

state = run.init()
for number in range(5):
    state, out = train(state, np.ones(200, np.float32))
    jax.block_until_ready(out)
"""
PLAN = """plan solo
axis data = 2
input grads : f32[100] partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""


def ended(place: Path, **environment: str) -> str:
    plan = place / "solo.plan"
    plan.write_text(PLAN)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(plan)], capture_output=True, text=True,
        check=True, timeout=200, env={**os.environ, "COMMPLAN_RECORDS": str(place), **environment},
    )  # fmt: skip
    return done.stderr


def test_steps_are_recorded_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, COMMPLAN_KEEP_RECORDS="1")
    records = read_records([str(tmp_path)])  # that of the program that ran nothing is gone
    assert [(record.plan, record.ranks) for record in records] == [("solo", 1)]
    run = read_run(records)
    assert [each.runs for each in run.slices] == [1, 2, 3, 4, 5]
    assert {each.name.partition(" of ")[0] for each in run.slices} == {"line 5"}
    assert {each.name.rpartition(", ")[2] for each in run.slices} == {"in `train`"}
    assert all(each.end > each.begin and not each.state for each in run.slices)
    assert blame(records).ranks[0].waits is None
    (shown,) = traces(run, {5: "step"})
    assert (shown.phase, shown.lanes[0].name) == ("step", "process 0")
    assert "of `train`, the median of 5" in shown.name
    assert main(["trace", "summarize", str(tmp_path)]) == 0
    assert "line 5, in `train`" in capsys.readouterr().out


def test_without_being_asked_nothing_is_counted(tmp_path: Path) -> None:
    assert ended(tmp_path) == ""
    assert list(tmp_path.glob("*.rec")) == []


def test_a_step_that_does_not_end_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    calls = Calls((0,), None)
    step, index = calls.counted(jax.jit(lambda: 0), "train")
    calls.locate(index, [5], "solo.plan")
    step()
    calls.waits, calls.moved = calls.number, time.monotonic() - 9.0
    reported_calls: dict[int, int] = {}
    for bound_s in (None, 10.0, 0.5, 0.5):  # of a first run twelve times as much
        alone.report_overdue(0, calls, bound_s, reported_calls)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("commplan: line 5 of solo.plan, in `train` has not ended for 9 s; Python: ")
