"""`mpirun -n N commplan run`: every rank rehearses its part, the first one reports, and none hangs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import images, interpreter, mpirun

mpirun.needs_mpi()

PLAN = """plan ranks

ensemble member = 2
axis     data   = ?

source images : bytes
fn decode (bytes)       -> u8[2, 2, 3], i32 on host
fn augment(u8[2, 2, 3]) -> u8[2, 2, 3] on host random

input params : tree per member, data
input grads  : tree per member partial data
state total  : f32[3]
input weight : f32[3]
fn zeros(f32[3]) -> f32[3] on device elementwise

at start {
    params = broadcast params over data from 0
    total  = map zeros(weight)
    output params
}

each step {
    raw            = load images batch 4 split data visit exactly_once seed 17
    pixels, labels = map decode(raw)
    batch          = map augment(pixels) per member
    output batch, labels

    grads = reduce grads over data by mean
    output grads
}

every 2 steps {
    total = map zeros(total)
}

phase evaluate {
    raw, valid     = load images batch 4 split data visit exactly_once seed 0 tail pad
    pixels, labels = map decode(raw)
    output pixels, labels, valid
}
"""

FUNCTIONS = f"""
import os
{images.FUNCTIONS}
def zeros(x):
    return x * 0

def fails(record):
    raise ValueError("truncated")

def fails_on_two(x):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        raise RuntimeError("no such thing")
    return x * 0
"""
LEAF = {"shape": [4, 3], "dtype": "f32"}


@pytest.fixture(name="words")
def _words(tmp_path: Path) -> list[str]:
    (tmp_path / "ranks.plan").write_text(PLAN)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "shapes.json").write_text(json.dumps({"params": {"w": LEAF}, "grads": {"w": LEAF}}))
    images.written(tmp_path / "images")
    place = str(tmp_path)
    return [
        "run", f"{place}/ranks.plan", "--shapes", f"{place}/shapes.json",
        "--source", f"images={place}/images", "--fn", f"decode={place}/functions.py:decode",
        "--fn", f"augment={place}/functions.py:augment", "--fn", f"zeros={place}/functions.py:zeros",
    ]  # fmt: skip


def started(ranks: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [str(mpirun.MPIRUN), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    return mpirun.started([*command, *interpreter.words(mpirun.environment()), "-m", "commplan.cli", *words])


def test_ranks_are_rehearsed_and_their_costs_gathered(words: list[str], tmp_path: Path) -> None:
    metrics = tmp_path / "input.prom"
    done = started(4, [*words, "--steps", "5", "--format", "json", "--metrics", str(metrics)])
    assert done.returncode == 0, done.stderr
    report: Any = json.loads(done.stdout)
    assert report["processes"] == 4 and report["axes"] == {"member": 2, "data": 2}
    phases = {phase["name"]: phase for phase in report["phases"]}
    calls = {name: phase["calls"] for name, phase in phases.items()}
    assert calls == {"start": 1, "step": 5, "every_2": 2, "evaluate": 3}
    step = phases["step"]
    assert [process["rank"] for process in step["ranks"]] == [0, 1, 2, 3]
    assert all(process["batches"] == 5 and process["queue"]["depth"] > 0 for process in step["ranks"])
    decode = next(line for line in step["lines"] if "decode" in line["stage"])
    each = [
        line["records"]
        for process in step["ranks"]
        for line in process["lines"]
        if line["stage"] == "map decode"
    ]
    assert (
        len(each) == 4
        and all(each)
        and decode["cpu_s"] == pytest.approx(decode["user_s"] + decode["system_s"])
    )
    for rank in range(4):
        assert f'rank="{rank}"' in (tmp_path / f"input.rank{rank}.prom").read_text()


def test_people_read_one_table(words: list[str]) -> None:
    done = started(2, [*words, "--steps", "2"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plan ranks on 2 ranks") == 1
    assert "user s" in done.stdout and "waited for peers s" in done.stdout
    assert "batches ready at a request" in done.stdout


def test_what_is_wrong_everywhere_is_said_once(words: list[str]) -> None:
    done = started(2, [word.replace("functions.py:augment", "functions.py:nothing") for word in words])
    assert done.returncode == 1
    assert done.stderr.count("error[CP1109]") == 1 and "on rank" not in done.stderr
    done = started(3, words)
    assert done.returncode == 1 and done.stderr.count("error[CP0840]") == 1


def test_a_record_that_fails_ends_all_ranks(words: list[str]) -> None:
    done = started(2, [word.replace("functions.py:decode", "functions.py:fails") for word in words])
    assert done.returncode != 0
    assert "CP0906" in done.stderr and "truncated" in done.stderr and "Traceback" not in done.stderr


def test_a_rank_that_fails_alone_ends_the_others(words: list[str]) -> None:
    done = started(4, [word.replace("functions.py:zeros", "functions.py:fails_on_two") for word in words])
    assert done.returncode != 0 and "no such thing" in done.stderr
    assert "rank 2" in done.stderr
