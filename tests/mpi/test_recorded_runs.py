"""The records of a run under MPI: each collective with its step and algorithm, stored on request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import mpirun
from support.reports import document

from commplan.cli import main
from commplan.recorder.collectives import read_run
from commplan.recorder.reading import read_records
from commplan.recorder.summary import summary

mpirun.needs_mpi()

PLAN = """plan recorded

axis node = 2
axis data = 2

input params : tree per node, data
input grads  : tree partial node, data

at start {
    params = broadcast params over node, data from 3
    output params
}

each step {
    grads = reduce grads over node, data by mean via ring { bucket = 4 KiB, overlap = backward }
    output grads
}
"""
SHAPES = {name: {leaf: {"shape": [1024], "dtype": "f32"} for leaf in "abc"} for name in ("params", "grads")}
PROGRAM = """
import sys, time
import jax, numpy as np
from mpi4py import MPI
import commplan
comm = MPI.COMM_WORLD
tree = {leaf: np.ones(1024, np.float32) for leaf in "abc"}
shapes = {name: jax.eval_shape(lambda: tree) for name in ("params", "grads")}
run = commplan.load(sys.argv[1]).compile(comm, shapes=shapes).bind(comm)
out, state = run.start(run.init(), params=tree)
step = jax.jit(lambda state, grads: run.step(state, grads=grads))
for number in range(6):
    if comm.rank == 1 and number == 4:
        time.sleep(0.5)
    out, state = step(state, tree)
    jax.block_until_ready(out)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of four ranks, with the plan, its shapes and a machine."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "recorded.plan").write_text(PLAN)
    (folder / "shapes.json").write_text(json.dumps(SHAPES))
    (folder / "t.toml").write_text(
        'name = "four"\n[[level]]\nname = "process"\ncount = 4\nlatency = "20us"\nbandwidth = "8Gbit/s"\n'
    )
    with mock.patch.dict(os.environ, COMMPLAN_RECORDS=str(folder), COMMPLAN_KEEP_RECORDS="1"):
        mpirun.ended_well(mpirun.started(mpirun.command(4, PROGRAM, folder / "recorded.plan"), 240))
    return folder


def test_each_collective_has_its_step_and_algorithm(place: Path):
    records = read_records([str(place)])
    assert [record.axes for record in records] == [{"node": 2, "data": 2}] * 4
    run = read_run(records)
    reduced = [group for group in run.collectives if group[0].phase == "step"]
    assert [group[0].step for group in reduced] == [step for step in range(1, 7) for _ in range(3)]
    assert all(len(group) == 4 for group in run.collectives)
    details = {group[0].details for group in reduced if group[0].details is not None}
    assert {(each.kind, each.algorithm, each.nbytes, each.axes) for each in details} == {
        ("all_reduce", "ring", 4096, ("node", "data"))
    }
    assert [each.opens for each in details].count("step") == 1
    late = [group for group in reduced if group[0].step == 5]
    assert {each.holder for each in late[0] if each.rank != 1} == {1}
    assert all(each.waited_s > 0.3 for each in late[0] if each.rank != 1)
    # Asynchronous collectives are awaited at the end, and no longer than they take.
    assert any(each.waits_apart for group in reduced for each in group)
    (broadcast,) = [group for group in run.collectives if group[0].phase == "start"]
    assert all(each.holder in (None, 3) for each in broadcast)


def test_the_summary_has_the_prediction_beside_it(place: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--plan", place / "recorded.plan", "--shapes", place / "shapes.json", "--backend", "mpi"]
    words += ["--topology", place / "t.toml", "--map", "node=process", "--map", "data=process"]
    shown = ["trace", "summarize", str(place), *map(str, words)]
    assert main([*shown, "--format", "json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(line["line"], line["count"]) for line in data["lines"]] == [(10, 1), (15, 18)]
    assert all(line["drift"] == pytest.approx(line["transfer"] / line["predicted"]) for line in data["lines"])
    (steps,) = [steps for steps in data["steps"] if steps["phase"] == "step"]
    assert steps["count"] == 6 and 0 < steps["communicating"] <= 1
    assert main(shown) == 0
    out = capsys.readouterr().out
    assert "plan recorded: 4 of 4 ranks on 1 host" in out and "line 15: all_reduce ring" in out
    assert "predicted" in out
    assert summary(read_run(read_records([str(place)]))).lines[0].predicted is None


def test_a_plan_whose_lines_have_moved_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "recorded.plan").write_text(PLAN.replace("at start", "# a remark\nat start"))
    words = ["--plan", tmp_path / "recorded.plan", "--shapes", place / "shapes.json", "--backend", "mpi"]
    assert main(["trace", "summarize", str(place), *map(str, words)]) == 1
    message = capsys.readouterr().err
    assert "CP1114" in message and "the run has communicated on line 10, but " in message
    assert "pass the version of the plan that ran" in message


def test_the_page_shows_the_run(place: Path, tmp_path: Path):
    words = [place / "recorded.plan", "--shapes", place / "shapes.json", "--backend", "mpi"]
    words += ["--records", place, "-o", tmp_path / "out.html"]
    assert main(["report", *map(str, words)]) == 0
    traces = {trace["phase"]: trace for trace in document(tmp_path / "out.html")["traces"]}
    assert traces.keys() == {"start", "step"}
    lanes = traces["step"]["lanes"]
    assert {lane["name"] for lane in lanes} >= {f"rank {rank}" for rank in range(4)}
    assert [len(lane["events"]) for lane in lanes if lane["name"] == "rank 2"] == [3]
