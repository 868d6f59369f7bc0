"""The examples at a small size, as users start them: other processes, warnings as errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import interpreter, mpirun
from support.campaign import parameters

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(name: str, *options: str) -> str:
    """Run an example to its end and return its output."""
    command = [*interpreter.words(), str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def results(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_ensemble_trains_and_reports(tmp_path: Path):
    place = tmp_path / "results.json"
    output = start(
        "ensemble_training.py",
        *("--epochs", "6", "--records", "128", "--held-out", "70"),
        *("--measured", "2", "--rounds", "2", "--json", str(place)),
    )
    report = results(place)
    losses = report["losses"]
    assert len(losses) == 12
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.1
    # 70 valid records, not the 128 that two padded batches hold.
    for accuracy in (*report["members"], report["ensemble"]):
        assert 0 < accuracy * 70 == pytest.approx(round(accuracy * 70))
    assert report["input"]["shared"]["decoded_per_step"] == pytest.approx(64)
    assert report["input"]["duplicated"]["decoded_per_step"] == pytest.approx(128)
    assert report["input"]["shared"]["cpu_ms"] < report["input"]["duplicated"]["cpu_ms"]
    kinds = [(row["phase"], row["kind"], row["over"]) for row in report["collectives"]]
    assert kinds == [("start", "broadcast", "data"), ("step", "all_reduce", "data")]
    assert 0 < report["communication"]["share"] < 1
    for words in ("held-out accuracy", "averaged ensemble", "duplicated", "all_reduce", "communication:"):
        assert words in output


def test_data_parallel_training_gives_the_weights_of_one_device():
    output = start("data_parallel.py", "--steps", "2", "--records", "64")
    assert "8 devices through the plan" in output
    gap = float(output.partition("between the weights: ")[2].split()[0])
    assert 0 < gap <= 1e-5


@pytest.mark.parametrize("micro", parameters([8], [1]))
def test_a_pipeline_gives_the_weights_of_one_device(micro: int):
    output = start("pipeline.py", "--steps", "6", "--micro", str(micro))
    assert "2 stages through the plan" in output
    assert 0 <= float(output.partition("between the weights: ")[2].split()[0]) <= 1e-5


@pytest.mark.parametrize("room", parameters([2], [8]))
def test_a_mixture_of_experts_gives_the_weights_of_one_device(room: int):
    output = start("mixture_of_experts.py", "--steps", "6", "--room", str(room))
    assert "4 experts through the plan" in output
    assert 0 <= float(output.partition("between the weights: ")[2].split()[0]) <= 1e-5


def test_each_process_of_the_ensemble_decodes_its_part(tmp_path: Path):
    place = tmp_path / "results.json"
    output = start("ensemble_processes.py", "--epochs", "1", "--records", "64", "--json", str(place))
    report = results(place)
    assert [member["shared"]["decoded"] for member in report] == [32, 32]
    assert [member["duplicated"]["decoded"] for member in report] == [64, 64]
    for member in report:
        assert member["shared"]["losses"] == member["duplicated"]["losses"]
        assert len(member["shared"]["losses"]) == 1
    assert report[0]["shared"]["losses"] != report[1]["shared"]["losses"]
    assert "member 1 decoded 32 of them (50%)" in output


def test_a_member_that_fails_ends_the_launch_with_a_message():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ensemble_processes as e\n"
        "import subprocess, threading\n"
        "good = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "bad = subprocess.Popen([sys.executable, '-c', 'raise SystemExit(3)'])\n"
        "try: e._until_all_end([good, bad], threading.Event())\n"
        "finally: good.kill(); good.wait()\n"
    )
    command = [sys.executable, "-c", code, str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the process of member 1 ended with status 3" in done.stderr


def under_mpirun(name: str, *options: str) -> str:
    """Run an example on eight ranks and return the output of rank 0."""
    script = EXAMPLES / name
    command = mpirun.command(8, script, *options)
    at = command.index(str(script))
    return mpirun.ended_well(mpirun.started([*command[:at], "-m", "mpi4py", *command[at:]], timeout=590))


@pytest.mark.campaign
@pytest.mark.timeout(600)  # eight processes compile the step
def test_the_ensemble_trains_on_ranks(tmp_path: Path):
    mpirun.needs_mpi()
    place = tmp_path / "results.json"
    output = under_mpirun(
        "ensemble_mpi.py", *("--epochs", "8", "--records", "64", "--held-out", "70", "--json", str(place))
    )
    report = results(place)
    ranks = report["ranks"]
    assert [(row["member"], row["data"]) for row in ranks] == [(m, d) for m in range(2) for d in range(4)]
    losses = np.array([row["losses"] for row in ranks])
    assert losses.shape == (8, 8)
    assert losses[:, -2:].mean() < losses[:, :2].mean() - 0.1
    assert all(row["decoded"] == 8 * 64 / 8 for row in ranks)
    # Replicas of one member have its parameters, members have their own.
    norms = [row["norm"] for row in ranks]
    assert len(set(norms[:4])) == len(set(norms[4:])) == 1
    assert norms[0] != norms[4]
    for accuracy in (*report["members"], report["ensemble"]):
        assert 0 < accuracy * 70 == pytest.approx(round(accuracy * 70))
    assert "averaged ensemble" in output


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_data_parallel_ranks_give_the_weights_of_one_device():
    mpirun.needs_mpi()
    output = under_mpirun("data_parallel.py", "--mpi", "--steps", "2", "--records", "64")
    assert "8 ranks through the plan" in output
    gap = float(output.partition("between the weights: ")[2].split()[0])
    assert 0 < gap <= 1e-5
