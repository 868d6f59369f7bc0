"""The target of a compilation on the command line: topology, backend, calibration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commplan.cli import main
from commplan.ir.serialization.text import parse_schedule

Capture = pytest.CaptureFixture[str]
EXAMPLES = Path(__file__).parents[2] / "examples"
RACKS = str(EXAMPLES / "topologies" / "two_rack.toml")
CALIBRATION = """version = 1
date = "2026-11-21"
backend = "mpi"
hosts = ["a", "b", "c", "d", "e", "f", "g", "h"]
overhead = 3e-06
gamma = 1e-10
call = 5e-05
round = 1e-04
[[level]]
name = "host"
latency = 6e-05
bandwidth = 2.4e+07
[[level]]
name = "rack"
latency = 1.2e-04
bandwidth = 2.4e+07
"""


@pytest.fixture(name="sums")
def _sums(tmp_path: Path) -> str:
    path = tmp_path / "sums.plan"
    path.write_text(
        "plan sums\naxis data = 8\ninput grads : tree partial data\n"
        "each step {\n    grads = reduce grads over data by mean\n    output grads\n}\n"
    )
    return str(path)


@pytest.fixture(name="terms")
def _terms(tmp_path: Path) -> str:
    path = tmp_path / "terms.json"
    path.write_text(json.dumps({"grads": {"w": {"shape": [4, 3], "dtype": "f32"}}}))
    return str(path)


def test_where_axes_lie_is_said(sums: str, terms: str, capsys: Capture) -> None:
    assert main(["compile", sums, "--shapes", terms, "--topology", RACKS, "--backend", "mpi"]) == 0
    out, err = capsys.readouterr()
    assert err == "axis data = 8 on host x 4, rack x 2\n"
    assert parse_schedule(out).backend == "mpi"


def test_explain_says_what_was_measured(sums: str, terms: str, tmp_path: Path, capsys: Capture) -> None:
    calibration = tmp_path / "lab.calibration.toml"
    calibration.write_text(CALIBRATION)
    flags = ["--shapes", terms, "--topology", RACKS, "--backend", "mpi", "--calibration", str(calibration)]
    assert main(["explain", sums, *flags]) == 0
    assert "measured 2026-11-21" in capsys.readouterr().out
    assert main(["explain", sums, *flags, "--format", "json"]) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    chosen = next(c for c in phase["lines"][0]["choices"] if c["by"] == "select")
    assert chosen["seconds"] > 0
    assert chosen["alternatives"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [([], "CP0727"), (["--topology", RACKS], "CP0753"), (["--topology", RACKS, "--backend", "mpi"], "")],
)
def test_a_calibration_must_fit(
    flags: list[str], code: str, sums: str, terms: str, tmp_path: Path, capsys: Capture
) -> None:
    calibration = tmp_path / "lab.calibration.toml"
    calibration.write_text(CALIBRATION)
    done = main(["compile", sums, "--shapes", terms, "--calibration", str(calibration), *flags])
    err = capsys.readouterr().err
    assert (done, f"error[{code}]" in err) == ((1, True) if code else (0, False))
