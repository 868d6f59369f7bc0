"""`bench.gpu` on a machine without a GPU: parts in separate processes, and the stored findings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import gpu

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def part(folder: Path, script: str) -> str:
    """A program in place of the interpreter, for which `script` is a part."""
    program = folder / "part.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def said(*lines: str, **figures: Any) -> str:
    return f"echo 'result: {json.dumps({'lines': lines, **figures})}'"


def test_a_part_runs_small_in_a_process_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--parts", "mock", "--rounds", "1", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "no GPU: everything runs small on CPU devices" in text and "this needs a GPU" in text
    report = json.loads(out.read_text())
    assert report["machine"]["small"] and set(report) == {"machine", "mock"}
    assert not any("unfinished" in result for result in report.values())


def test_a_part_that_fails_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fine: dict[str, Any] = {"lines": ["fine"]}
    answers = {"machine": fine, "smoke": {"lines": ["half"], "failed": "status 1: it broke"}, "tax": fine}
    monkeypatch.setattr(gpu, "measured", lambda part, *_: answers[part])
    assert gpu.main(["--parts", "smoke,tax"]) == 1
    text = capsys.readouterr().out
    assert "   half\n   not measured: status 1: it broke" in text
    assert "2 parts measured, without smoke" in text
    assert gpu.main(["--parts", "tax", "--seconds", "1"]) == 1
    assert "not measured: no time was left" in capsys.readouterr().out


def test_the_file_has_every_finding_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    states: list[dict[str, Any]] = []

    def measured(part: str, *arguments: Any) -> dict[str, Any]:
        if part == "tax":
            arguments[-1]({"lines": ["first"], "tax": 0.5, "unfinished": True})
            states.append(json.loads(out.read_text()))
            raise KeyboardInterrupt
        return {"lines": [part]}

    monkeypatch.setattr(gpu, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--parts", "smoke,tax", "--out", str(out)])
    assert states == [json.loads(out.read_text())]
    assert states[0]["smoke"] == {"lines": ["smoke"]}
    assert states[0]["tax"] == {"lines": ["first"], "tax": 0.5, "unfinished": True}
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_lines_are_printed_once_and_interim_ones_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def measured(part: str, *arguments: Any) -> dict[str, Any]:
        arguments[-1]({"lines": ["1 of 2"], "interim": True, "unfinished": True})
        arguments[-1]({"lines": ["a"], "unfinished": True})
        return {"lines": ["a", "a", "b"]}

    monkeypatch.setattr(gpu, "measured", measured)
    assert gpu.main(["--parts", "tax"]) == 0
    assert capsys.readouterr().out.count("   a\n   a\n   b\n") == 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"echo noise; {said('first', x=1)}; {said('first', 'second', x=2)}; exec sleep 60",
         {"lines": ["first", "second", "stopped after 0 s: the rest is not measured"], "x": 2}),
        ("exec sleep 60", {"failed": "it did not end in 0 s"}),
        (f"{said('first')}; echo it broke >&2; exit 3", {"lines": ["first"], "failed": "status 3: it broke"}),
        (f"{said('first', interim=True)}; {said('first', 'last')}", {"lines": ["first", "last"]}),
    ],
    ids=["stopped", "silent", "broken", "ended"],
)  # fmt: skip
def test_a_part_keeps_its_findings(
    script: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.sys, "executable", part(tmp_path, script))
    monkeypatch.setattr(gpu, "LEAST_S", 0.4)
    assert gpu.measured("tax", 0.3, 1, os.environ, lambda result: None) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_its_findings_and_no_process(tmp_path: Path, number: int) -> None:
    out, pid = tmp_path / "gpu.json", tmp_path / "pid"
    program = part(tmp_path, f"{said('so far')}; echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60")
    code = (
        f"import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from bench import gpu; sys.executable = {program!r}\n"
        f"gpu.main(['--parts', 'tax', '--out', {str(out)!r}])"
    )
    running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pid.exists() and out.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(number)
    assert running.wait(60) in (128 + signal.SIGTERM, -signal.SIGINT, 1)
    assert json.loads(out.read_text())["machine"]["lines"] == ["so far"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_wheels_stand_in_for_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "msgspec" else sys)
    with contextlib.ExitStack() as stack, pytest.raises(SystemExit, match=r"no msgspec-\*\.whl in"):
        gpu._paths(tmp_path, stack)
    with zipfile.ZipFile(tmp_path / "msgspec-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("msgspec/__init__.py", "version = 1")
    with contextlib.ExitStack() as stack:
        site = Path(gpu._paths(tmp_path, stack)[-1])
        assert (site / "msgspec" / "__init__.py").read_text() == "version = 1"
    assert not site.exists()
    assert os.pathsep not in str(site)
