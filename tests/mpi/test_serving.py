"""Servers under mpirun: a recording replays bitwise, and acknowledged updates survive."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from support import mpirun

mpirun.needs_mpi()
SCRIPT = Path(__file__).with_name("serving_worker.py")


def values(*seed: int) -> Any:
    return np.float32(np.random.default_rng(seed).integers(-9, 9, 3000))


def weights(steps: int, workers: int = 2) -> Any:
    w = values(0)
    for step in range(steps):
        for worker in range(workers):
            w = w + values(step, worker)
    return w


def served(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r"^served: (.*)$", output, re.MULTILINE)]


def test_a_recorded_run_is_replayed_to_the_same_bits(tmp_path: Path):
    mode = "async"
    results = served(mpirun.run(4, SCRIPT, "averaging", tmp_path, mode, "record"))
    assert results[0]["requests"] == {str(worker): 8 for worker in range(3)}
    assert results[0]["updates"] == 3 * 6 * 3  # workers, steps and units
    mpirun.run(4, SCRIPT, "averaging", tmp_path, mode, "replay")
    first, again = (np.load(tmp_path / f"{mode}-{how}.npy") for how in ("record", "replay"))
    assert first.tobytes() == again.tobytes()


def test_hogwild_adds_in_shared_memory(tmp_path: Path):
    results = served(mpirun.run(3, SCRIPT, "averaging", tmp_path, "hogwild", "plain"))
    assert results[0]["shared"] == 2 * 6
    assert results[0]["updates"] == 0


def test_a_killed_server_loses_nothing_that_was_answered(tmp_path: Path):
    done = mpirun.start(4, SCRIPT, "pushing", tmp_path, 0, 1000, 3)
    assert done.returncode != 0
    answered = [int((tmp_path / f"answered-{worker}").read_text()) for worker in range(2)]
    assert min(answered) >= 3
    output = mpirun.run(4, SCRIPT, "pushing", tmp_path, 2000, 1)
    assert all(result["restored"] for result in served(output))
    # Every unit is at the last acknowledged update, or at a later one.
    near = [weights(steps) for steps in range(max(answered), max(answered) + 3)]
    begins = [np.load(tmp_path / f"begins-{worker}.npy") for worker in range(2)]
    np.testing.assert_array_equal(*begins)
    for start in range(0, 3000, 1000):
        elements = slice(start, start + 1000)
        assert any(np.array_equal(begins[0][elements], w[elements]) for w in near), start


def test_the_others_go_on_without_a_dead_worker(tmp_path: Path):
    words = mpirun.command(4, SCRIPT, "dying", tmp_path, 1)
    done = mpirun.started([words[0], "--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1", *words[1:]])
    assert "async_mpi_finalize" not in done.stderr
    assert [result["lost"] for result in served(done.stdout)] == [[1], [1]], done.stderr
    assert "worker 1 died after" in done.stderr
    w = weights(2)
    for step in range(2, 6):
        w = w + values(step, 0)
    np.testing.assert_array_equal(np.load(tmp_path / "ends.npy"), w)
