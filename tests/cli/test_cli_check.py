"""`check`: warnings, repairs and watching, as the command shows them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commplan.cli import main
from commplan.cli.console import Console
from commplan.cli.verbs import check

Capture = pytest.CaptureFixture[str]
TWO_RACK = str(Path(__file__).parents[2] / "examples" / "topologies" / "two_rack.toml")
PLAN = """plan p
axis data = 8
source s : u8[4]
input x : tree partial data
each step {
    r, n = load s batch 64 visit at_most_once seed 1 tail drop   # kept as it is
    y = reduce x over data by sum via recursive_doubling { bucket = 1 GiB }
    output r, y
}
"""


@pytest.fixture(name="plan")
def _plan(tmp_path: Path) -> Path:
    path = tmp_path / "p.plan"
    path.write_text(PLAN)
    return path


def codes(capsys: Capture) -> list[str]:
    document = json.loads(capsys.readouterr().out)
    assert document["summary"] == {"errors": 0, "warnings": len(document["diagnostics"])}
    return [each["code"] for each in document["diagnostics"]]


def test_warnings_leave_the_exit_code(plan: Path, capsys: Capture):
    assert main(["check", str(plan), "--format", "concise"]) == 0
    assert capsys.readouterr().out == f"{plan}:6:8: warning[CP1201]: the value `n` is never used\n"
    assert main(["check", str(plan), "--strict"]) == 1
    assert "1 warning; `commplan explain CP1201`" in capsys.readouterr().err


def test_what_is_known_beside_the_plan(plan: Path, tmp_path: Path, capsys: Capture):
    shapes, program = tmp_path / "shapes.json", tmp_path / "train.py"
    shapes.write_text(json.dumps({"x": {"w": {"shape": [1000, 1000], "dtype": "f32"}}}))
    program.write_text("out = run.step(x=grads)\nuse(out.y)\n")
    check = ["check", str(plan), "--format", "json"]
    assert main([*check, "--records", "s=100", "--program", str(program)]) == 0
    assert codes(capsys) == ["CP1206", "CP1201", "CP1202"]
    assert main([*check, "--records", "t=100"]) == 1
    (unknown,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert (unknown["code"], unknown["notes"][0]["text"]) == ("CP1108", "it declares: s")
    assert main([*check, "--shapes", str(shapes), "--topology", TWO_RACK, "--backend", "mpi"]) == 0
    assert codes(capsys) == ["CP1201", "CP1203", "CP1204"]
    shapes.write_text("{}")
    assert main([*check, "--shapes", str(shapes)]) == 1
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["code"] == "CP0701"
    program.write_text("out = (")
    assert main(["check", str(plan), "--program", str(program)]) == 1
    assert "error[CP1116]" in capsys.readouterr().err


def test_fix_writes_the_file_and_says_so(plan: Path, capsys: Capture):
    assert main(["check", str(plan), "--fix"]) == 0
    assert "1 repair in" in (err := capsys.readouterr().err) and "no problems" in err
    assert plan.read_text() == PLAN.replace("r, n", "r")
    stamp = plan.stat()
    assert main(["check", str(plan), "--fix", "--format", "json"]) == 0
    document: Any = json.loads(capsys.readouterr().out)
    assert document["files"] == [{"file": str(plan), "repairs": 0, "text": None}]
    assert (plan.stat().st_mtime_ns, plan.stat().st_ino) == (stamp.st_mtime_ns, stamp.st_ino)


def test_fix_of_stdin_goes_to_stdout(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "commplan", "check", "-", "--fix"],
        input=PLAN, capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert done.stdout == PLAN.replace("r, n", "r")


def test_fix_leaves_a_file_that_changed_meanwhile(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    read = Console.read

    def changed_behind(console: Console, path: str) -> str:
        text = read(console, path)
        plan.write_text(PLAN + "# of an editor\n")
        return text

    monkeypatch.setattr(check.Console, "read", changed_behind)
    assert main(["check", str(plan), "--fix"]) == 1
    assert "error[CP1101]" in capsys.readouterr().err
    assert plan.read_text() == PLAN + "# of an editor\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_fix_of_a_file_that_may_not_be_written_leaves_it(plan: Path, capsys: Capture):
    plan.chmod(0o444)
    assert main(["check", str(plan), "--fix"]) == 1
    assert "error[CP1101]" in capsys.readouterr().err and plan.read_text() == PLAN


@pytest.mark.parametrize(
    "flags",
    [
        ["-", "--watch"],
        ["x.plan", "--watch", "--format", "json"],
        ["-", "--fix", "--format", "sarif"],
        ["x.plan", "--diff", "--format", "json"],
    ],
)
def test_what_cannot_be_done_together(flags: list[str], capsys: Capture):
    assert main(["check", *flags]) == 2
    assert "check: --" in capsys.readouterr().err


def test_diff_shows_repairs_and_makes_none(plan: Path, capsys: Capture):
    text = PLAN.replace("over data", "over dta")
    plan.write_text(text)
    assert main(["check", str(plan), "--diff"]) == 1
    shown = capsys.readouterr()
    assert "\n-    " in shown.out and "over dta" in shown.out and "over data" in shown.out
    assert "error[CP0104]" in shown.err and plan.read_text() == text
    assert main(["check", str(plan), "--fix"]) == 0
    capsys.readouterr()
    assert main(["check", str(plan), "--diff", "--strict"]) == 0
    assert capsys.readouterr().out == ""


def test_watch_checks_again_until_it_is_interrupted(plan: Path):
    command = [sys.executable, "-u", "-m", "commplan", "check", str(plan), "--watch"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr and process.stdout
        _until(process.stderr, "watching")
        _put(plan, PLAN.replace("r, n", "r"))
        assert "no problems" in _until(process.stderr, "watching")
        plan.unlink()
        assert "error[CP0001]" in _until(process.stderr, "watching")
        _put(plan, PLAN.replace("by sum", "by sun"))
        assert "error[CP0404]" in _until(process.stderr, "watching")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "interrupted\n", 130)


def _put(path: Path, text: str) -> None:
    """Write a file in one step, as editors do: a watcher never reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _until(stream: Any, word: str) -> str:
    """The text of a stream up to the line that begins with `word`."""
    lines = ""
    for line in stream:
        if line.startswith(word):
            return lines
        lines += line
    raise AssertionError(f"the stream ended before `{word}`:\n{lines}")
