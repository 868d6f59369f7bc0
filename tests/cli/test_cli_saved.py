"""Saved schedules: `explain` says the same of one as of its plan, and verbs that read plans refuse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commplan.cli import main

PLAN = """plan p

axis data = 4
input grads : tree partial data

each step {
    grads = reduce grads over data by mean
    output grads
}
"""


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> tuple[str, str, str]:
    """A plan, its shapes, and its compiled schedule."""
    plan, shapes, saved = (str(tmp_path / name) for name in ("p.plan", "shapes.json", "p.schedule.json"))
    Path(plan).write_text(PLAN)
    Path(shapes).write_text(json.dumps({"grads": {"w": {"shape": [4, 3], "dtype": "f32"}}}))
    assert main(["compile", plan, "--shapes", shapes, "-o", saved]) == 0
    return plan, shapes, saved


def test_explain_says_the_same_of_a_plan_and_of_its_schedule(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, shapes, saved = files
    capsys.readouterr()
    assert main(["explain", plan, "--shapes", shapes]) == 0
    explained = capsys.readouterr().out
    assert "reduce grads over data by mean" in explained
    assert main(["explain", saved]) == 0
    assert capsys.readouterr().out == explained


@pytest.mark.parametrize("verb", ["check", "fmt", "compile", "run", "stubs"])
def test_verbs_that_read_plans_say_what_reads_a_schedule(
    verb: str, files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(files[2]).read_bytes()
    assert main([verb, files[2]]) == 1
    message = capsys.readouterr().err
    assert message.count("error[") == 1 and "CP1010" in message
    assert "saved schedules are read by explain, verify, simulate" in message
    assert Path(files[2]).read_bytes() == before
