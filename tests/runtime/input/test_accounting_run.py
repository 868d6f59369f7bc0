"""The input costs of a run: `batches.summary`, `batches.write_metrics` and `run.metrics`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.embedding import mesh_of

import commplan
from commplan.diagnostics import CommplanError

PLAN = """plan metered

ensemble member = 2
source images : bytes
fn decode(bytes) -> u8[2, 3] on host

each step {
    raw    = load images batch 4 visit exactly_once seed 17
    pixels = map decode(raw)
    output pixels
}

phase evaluate {
    raw    = load images batch 4 visit exactly_once seed 17
    pixels = map decode(raw)
    output pixels
}
"""
IMAGES = [bytes([number] * 6) for number in range(10)]


def decode(record: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(record, np.uint8).reshape(2, 3)


def bound() -> commplan.Run:
    mesh = mesh_of(member=2)
    return (
        commplan.loads(PLAN)
        .compile(mesh)
        .bind(mesh, sources={"images": IMAGES}, functions={"decode": decode})
    )


def counted(path: Path, phase: str) -> float:
    """Records decoded in `phase`, as the file says."""
    (line,) = [
        line
        for line in path.read_text().splitlines()
        if line.startswith("commplan_input_records_total")
        and f'phase="{phase}"' in line
        and 'stage="map decode"' in line
    ]
    return float(line.split()[-1])


def test_batches_write_what_they_cost(tmp_path: Path):
    with bound().batches() as batches:
        assert len(list(batches)) == 3
        assert batches.write_metrics(tmp_path / "input.prom") == tmp_path / "input.prom"
        assert counted(tmp_path / "input.prom", "step") == 12
        assert batches.summary().rank == 0 and batches.summary().plan == "metered"


def test_a_run_keeps_a_file_of_all_its_batches(tmp_path: Path):
    run, path = bound(), tmp_path / "input.prom"
    with run.metrics(path, period_s=600) as writer:
        assert writer.path == path and path.read_text() == ""
        with run.batches() as batches:
            list(batches)
        for _ in range(2):
            with run.batches("evaluate") as batches:
                list(batches)
        writer.write()
        assert (counted(path, "step"), counted(path, "evaluate")) == (12, 24)
        with run.batches(member=1) as batches:
            list(batches)
    assert counted(path, "step") == 24


def test_a_run_that_is_gone_has_written_its_last(tmp_path: Path):
    """No explicit close: the interpreter's exit closes everything."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import test_accounting_run as t\n"
        "run = t.bound()\n"
        "run.metrics(sys.argv[1], period_s=600)\n"
        "print(len(list(run.batches())))\n"
    )
    path = tmp_path / "input.prom"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert counted(path, "step") == 12


def test_metrics_that_cannot_be_kept_are_refused(tmp_path: Path):
    run = bound()
    for destination, period, code in (
        (tmp_path / "no" / "x.prom", 5, "CP0960"),
        (tmp_path / "x.prom", 0, "CP0961"),
    ):
        with pytest.raises(CommplanError) as caught:
            run.metrics(destination, period_s=period)
        assert caught.value.diagnostics[0].code == code
