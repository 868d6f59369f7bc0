"""A slice of `bench.lifecycle`, and that it finds faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import mpirun
from support.campaign import parameters

from bench.lifecycle import __main__ as lifecycle


# The few starts: feeds with members that are killed and return, a group with clocks, and both launchers.
@pytest.mark.parametrize(("seed", "count"), parameters([(1303, 5)], [(0, 300)]))
def test_each_record_is_taken_once_whatever_happens(seed: int, count: int, tmp_path: Path) -> None:
    mpirun.needs_mpi()
    summary = tmp_path / "summary.json"
    words = ["-m", "bench.lifecycle", "--count", str(count), "--seed", str(seed), "--json", str(summary)]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=60 * count, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(summary.read_text())
    assert report["problems"] == [] and report["starts"] == count and report["batches"] > 0
    assert report["kill"] and report["returned"]


def written(tmp_path: Path, *lives: list[tuple[int, int, list[int]]], **orders: Any) -> list[str]:
    """Errors in the batches (epoch, step, records) of a member that has ended."""
    parts: list[lifecycle.Life] = []
    for number, batches in enumerate(lives):
        first = {"epoch": batches[0][0], "step": batches[0][1]}
        lines: list[dict[str, Any]] = [{"joined": first, "goal": 2}]
        lines += [{"epoch": epoch, "step": step, "records": records} for epoch, step, records in batches]
        lines += [{"ended": True}] if number + 1 == len(lives) else []
        log = tmp_path / f"0.{number}.log"
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        state = first if number else None
        entry = {"index": 0, "batch": 2, "own_batch": 0, "close": None, "log": str(log), "state": state}
        parts.append(lifecycle.Life({**entry, **orders}))
    start = lifecycle.Start(0, "feed", tmp_path, {"count": 1, "records": 4}, parts[:1])
    return list(lifecycle.problems_of_records(start, parts[1:]))


FIRST, SECOND = [(0, 0, [3, 1]), (0, 1, [0, 2])], [(1, 0, [2, 1]), (1, 1, [3, 0])]


def test_what_is_written_down_is_judged(tmp_path: Path) -> None:
    assert written(tmp_path, FIRST + SECOND) == []
    assert written(tmp_path, FIRST, SECOND) == []
    assert written(tmp_path, [*FIRST, SECOND[0]], SECOND) == []  # from a saved state, a batch again
    assert written(tmp_path, FIRST) == ["process 0: epoch 1 lacks records [0, 1, 2, 3]"]
    assert written(tmp_path, [*FIRST, SECOND[0], (1, 1, [3, 2])]) == [
        "process 0: epoch 1 has records [2] twice", "process 0: epoch 1 lacks records [0]",
    ]  # fmt: skip
    assert written(tmp_path, [*FIRST, FIRST[0], *SECOND]) == ["process 0 was given batch (0, 0) twice"]
    assert written(tmp_path, [*FIRST, SECOND[0]], [(1, 0, [1, 2]), SECOND[1]]) == [
        "process 0 has other records at (1, 0) than others"
    ]
