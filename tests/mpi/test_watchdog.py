"""A rank that blocks the others is named, with its line and its activity, instead of a hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from unittest import mock

import pytest
from support import mpirun
from support.campaign import parameters

from bench.harness.mpirun import ULFM

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "watchdog_worker.py"
BOUND_S = 2.0
STOPPED = "rank 2 is stopped (SIGSTOP, or a debugger)"
LATE = "rank 2 has not arrived within "


def job(
    fault: str,
    records: Path,
    algorithm: str = "ring",
    form: str = "call",
    options: tuple[str, ...] = (),
    ranks: int = 3,
) -> subprocess.CompletedProcess[str]:
    command = mpirun.command(ranks, WORKER, fault, algorithm, form, BOUND_S)
    with recorded_in(records):
        return mpirun.started([command[0], *options, *command[1:]])


@contextlib.contextmanager
def recorded_in(place: Path) -> Generator[None]:
    with mock.patch.dict(os.environ, COMMPLAN_RECORDS=str(place)):
        yield


def told(done: subprocess.CompletedProcess[str], rank: int) -> str:
    """The text of a rank's error. `bench.faults` measures its delay."""
    match = re.search(rf"rank {rank} was told: (.*?)waits for it", done.stdout, re.DOTALL)
    assert match is not None, done.stdout + done.stderr
    return match[1]


@pytest.fixture(name="slept", scope="module")
def _slept(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A job in which rank 2, on another host, sleeps, and the folder of its records."""
    records = tmp_path_factory.mktemp("records")
    with mock.patch.dict(os.environ, WORKER_HOSTS=str(tmp_path_factory.mktemp("hosts"))):
        return job("sleep", records), records


def test_who_sleeps_is_named_on_all_that_wait(slept: tuple[subprocess.CompletedProcess[str], Path]):
    check_named("sleep", slept[0])
    text = told(slept[0], 0)
    assert "is alive, in no collective for" in text
    assert "it last finished line 7 of x.plan, 5 times so far" in text
    assert "watchdog_worker.py:" in text and " in decode, from " in text


@pytest.mark.parametrize("fault", parameters(["stopped early"], ["stop"]))
def test_who_is_stopped_is_named_on_all_that_wait(fault: str, tmp_path: Path):
    check_named(fault, job(fault, tmp_path))


@pytest.mark.parametrize("fault", parameters(["stop", "lock"], ["stopped early"]))
def test_who_holds_split_collectives_is_named(fault: str, tmp_path: Path):
    done = job(fault, tmp_path, form="split")
    check_named(fault, done)
    if fault == "lock":
        text = told(done, 0)
        assert re.search(r"its Python: \S+_worker\.py:\d+ in keep_the_", text)
        assert "; it holds the interpreter's lock" in text


def test_a_rank_that_keeps_the_lock_answers_all_that_ask_it_in_time(tmp_path: Path):
    done = job("held", tmp_path, ranks=5)
    assert done.returncode == 0, done.stdout


def check_named(fault: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode != 0
    for rank in (0, 1):
        text = told(done, rank)
        assert (STOPPED if fault.startswith("stop") else LATE) in text and text.endswith(
            "; line 6 of x.plan "
        )
        if fault.startswith("stop"):
            assert "note: rank 0 waits in line 6 of x.plan, in round 1 of 4, waiting for rank 2" in text
            assert re.search(r"note: rank 2 is PID (\d+) on \S+, and lives: kill -CONT \1 lets it end", text)
            assert "note: rank 1 waits in line 6 of x.plan, in round 2 of 4, waiting for rank 0" in text


def test_another_order_of_collectives_is_said_with_both_lines(tmp_path: Path):
    done = job("order", tmp_path)
    for rank in (0, 1, 2):
        text = told(done, rank)
        assert "the ranks have waited for each other" in text
        assert "rank 0 waits in line 6 of x.plan" in text and "rank 2 waits in line 7 of x.plan" in text


@pytest.mark.parametrize(
    ("fault", "form"),
    parameters([("stop", "split")], [("stop", "call"), ("sleep", "call"), ("sleep", "split")]),
)
def test_mpis_own_collectives_end_too(fault: str, form: str, tmp_path: Path):
    done = job(fault, tmp_path, "native", form)
    assert done.returncode != 0
    assert (STOPPED if fault == "stop" else LATE) in done.stdout + done.stderr
    assert "line 6 of x.plan waits for it" in done.stdout + done.stderr


def test_mpis_own_collectives_fail_where_mpi_outlives_its_dead(tmp_path: Path):
    done = job("sleep", tmp_path, "native", "call", ULFM)
    assert LATE in done.stdout and "has died" not in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("fault", parameters(["late"], ["none"]))
def test_the_others_wait_for_a_rank_that_announces_late_work(fault: str, tmp_path: Path):
    out = mpirun.ended_well(job(fault, tmp_path))
    assert sorted(out.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
    assert list(tmp_path.iterdir()) == []  # a clean end leaves no record


def test_the_records_say_the_same_afterwards(slept: tuple[subprocess.CompletedProcess[str], Path]):
    folder = slept[1]
    assert len(list(folder.iterdir())) == 3
    from commplan.recorder.blame import blame  # noqa: PLC0415
    from commplan.recorder.collectives import read_run  # noqa: PLC0415
    from commplan.recorder.reading import read_records  # noqa: PLC0415
    from commplan.recorder.trace import trace  # noqa: PLC0415

    records = read_records([str(folder)])
    verdict = blame(records)
    assert verdict.holders == {2: "it has not reached line 6 of x.plan"}
    assert any(LATE in text for text in verdict.verdicts.values())
    assert {rank.state for rank in verdict.ranks[:2]} <= {"dead", "ended"}  # the launcher may be sooner
    assert verdict.ranks[2].state == "dead"
    assert [str(rank.progress) for rank in verdict.ranks] == [
        "in round 1 of 4, waiting for rank 2", "in round 2 of 4, waiting for rank 0", "None",
    ]  # fmt: skip
    slices = [event for event in json.loads(trace(read_run(records)))["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 3 * 10 + 2  # five whole steps on all ranks, and the one that two wait in


PLAN = """
plan p
axis data = 3
input grads : f32[10000] partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
PROGRAM = """
import sys, time
import jax, numpy as np
from mpi4py import MPI
import commplan
comm = MPI.COMM_WORLD
run = commplan.loads(%r).compile(comm).bind(
    comm, watchdog_s=2.0, busy_s=3.0, on_hang="report" if sys.argv[1] == "report" else "abort")
step = jax.jit(lambda state, grads: run.step(state, grads=grads))
state = run.init()
for number in range(8):
    if comm.rank == 1 and number == 5:
        if sys.argv[1] == "late":
            with run.late():
                time.sleep(5)
        else:
            time.sleep(5 if sys.argv[1] == "report" else 600)
    out, state = step(state, np.ones(10000, np.float32))
    if "unawaited" not in sys.argv[1]:
        jax.block_until_ready(out)
print("done", flush=True)
"""


def bound(what: str, records: Path) -> subprocess.CompletedProcess[str]:
    with recorded_in(records):
        return mpirun.started(mpirun.command(3, PROGRAM % PLAN, what))


def test_a_bound_program_is_watched(tmp_path: Path):
    done = bound("stuck", tmp_path)
    assert done.returncode != 0
    assert "rank 1 has not arrived within" in done.stderr and "line 6 of <plan> waits for it" in done.stderr


def test_a_bound_program_waits_for_who_is_late(tmp_path: Path):
    assert mpirun.ended_well(bound("late", tmp_path)).count("done") == 3


def test_a_bound_program_reports_a_late_rank_once_and_goes_on(tmp_path: Path):
    done = bound("report", tmp_path)
    assert mpirun.ended_well(done).count("done") == 3
    assert done.stderr.count("commplan: rank 1 has not arrived within") == 1
    assert "the limit is" not in done.stderr


def test_steps_that_nobody_awaits_end_the_job_too(tmp_path: Path):
    done = bound("stuck unawaited", tmp_path)
    assert done.returncode != 0
    assert "has not arrived within" in done.stderr and ": the job ends" in done.stderr
