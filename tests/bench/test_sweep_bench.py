"""The bench of sweeps: its timetable, a small one that is played, and what it says of broken epochs."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.sweep import __main__ as sweep
from bench.sweep.account import Result, result
from bench.sweep.program import BATCH, ENTRY
from bench.sweep.stage import Played
from bench.sweep.timetable import Asked, Member, timetable

TORCH = os.environ.get("COMMPLAN_TORCH")  # an interpreter that has PyTorch: `make torch` names one
HAS_TORCH = importlib.util.find_spec("torch") is not None
ASKED = Asked(members=12, torch=4, killed=3, returning=2, minute=60.0, seed=1)


def test_a_timetable_is_a_function_of_its_seed() -> None:
    members = timetable(ASKED)
    assert members == timetable(ASKED) != timetable(dataclasses.replace(ASKED, seed=2))
    assert sorted(member.kind for member in members) == ["jax"] * 4 + ["numpy"] * 4 + ["torch"] * 4
    starts = [member.starts for member in members]
    assert starts == sorted(starts) and starts[0] >= 0 and starts[-1] <= 60
    killed = [member for member in members if member.dies is not None]
    assert len(killed) == 3 and all(member.dies and member.dies > member.starts for member in killed)
    assert sum(member.returns is not None for member in killed) == 2


def test_a_small_sweep_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With PyTorch where there is one. What it costs is not looked at: other tests run beside it."""
    pytest.importorskip("PIL")
    pytest.importorskip("sklearn")
    pytest.importorskip("skimage")
    out = tmp_path / "sweep.json"
    torch = int(HAS_TORCH or TORCH is not None)
    words = f"--members 3 --torch {torch} --killed 2 --returning 1 --minute 1 --step 0.02"
    words += f" --records {2 * BATCH} --own-batches 20 --systems commplan --timeout 120"
    words += f" --torch-python {TORCH or sys.executable}"
    sweep.main([*words.split(), "--out", str(out)])
    said = capsys.readouterr().out
    (played,) = msgspec.json.decode(out.read_bytes(), type=list[Result])
    assert played.is_exact and played.sockets == 0, said
    assert [file for file in played.left if not file.startswith("/dev/shm")] == [], said  # of other tests
    assert played.given > 0 and played.cpu_s > 0 and played.limit_s > 0 and "back at" in said


def write(log: Path, epochs: list[list[int]]) -> None:
    entries: Any = np.zeros(len(epochs), ENTRY)
    for entry, (epoch, *ids) in zip(entries, epochs, strict=True):
        entry["epoch"], entry["rows"], entry["ids"][: len(ids)] = epoch, len(ids), ids
    entries.tofile(log)


def test_epochs_that_are_not_whole_are_counted(tmp_path: Path) -> None:
    members = [
        Member(0, "numpy", 0.0),
        Member(1, "jax", 0.0, 5.0),
        Member(2, "jax", 0.0, 5.0, 6.0),
        Member(3, "numpy", 0.0),
    ]
    played = Played("commplan", members, kept={2: (1, 2)}, folder=tmp_path)
    write(played.log(members[0]), [[0, 0, 1], [0, 2], [2, 0, 1, 1]])  # epoch 1 never came, 2 is broken
    write(played.log(members[1]), [[0, 2, 1, 0], [1, 0]])  # killed inside epoch 1
    write(played.log(members[2]), [[0, 0, 1], [0, 2], [0, 2]])  # went on from before its second batch
    counts = result(played, 3, 1.0, {"numpy": 0.0, "jax": 0.0})
    seen = [(v.whole, v.broken, v.missing, v.again, v.skipped) for v in counts.visits]
    assert seen == [(1, 1, 1, 1, 1), (1, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0)]
    assert not counts.is_exact
    assert counts.given == (2 + 1 + 3) + (3 + 1) + (2 + 1 + 1)


@pytest.mark.parametrize(
    "options", [["--records", "100"], ["--killed", "1", "--returning", "2"], ["--systems", "ours"]]
)
def test_what_is_asked_is_checked(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(options)


@pytest.mark.skipif(HAS_TORCH, reason="PyTorch is installed")
def test_a_kind_that_is_not_installed_is_named() -> None:
    with pytest.raises(SystemExit, match="torch is not installed"):
        sweep.main(["--members", "1", "--torch", "1", "--killed", "0", "--returning", "0", "--records", "64"])
