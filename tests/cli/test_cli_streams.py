"""Streams that are closed, and shapes that are nested deeper than anything reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = b"plan p\naxis data = 8\ninput x : tree per data\nat start {\n x = broadcast x over data from 0\n}\n"


def shell(command: str, cwd: Path, first: str = "") -> subprocess.CompletedProcess[bytes]:
    (cwd / "p.plan").write_bytes(PLAN)
    return subprocess.run(
        ["sh", "-c", f'{first} exec "$0" -m commplan.cli {command}', sys.executable],
        capture_output=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [("check p.plan >&-", 0), ("check p.plan 2>&-", 0), ("passes >&-", 0), ("check - <&-", 1)],
)
def test_closed_streams(tmp_path: Path, command: str, code: int) -> None:
    done = shell(command, tmp_path)
    assert done.returncode == code
    assert b"internal failure" not in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("depth", [900, 100_000])
def test_shapes_nested_too_deep(tmp_path: Path, depth: int) -> None:
    leaf = '{"shape": [3], "dtype": "f32"}'
    (tmp_path / "s.json").write_text('{"x": ' + "[" * depth + leaf + "]" * depth + "}")
    done = shell("compile p.plan --shapes s.json -o -", tmp_path)
    assert done.returncode == 1
    assert b"nested too deep" in done.stderr


@pytest.mark.parametrize(
    "command", ["passes", "passes --format json", "--help", "check --format json p.plan"]
)
def test_a_full_disk_under_stdout_is_said(tmp_path: Path, command: str) -> None:
    done = shell(f"{command} >/dev/full", tmp_path, "unset PYTHONUNBUFFERED;")
    assert done.returncode == 1
    assert b"CP1101" in done.stderr and b"standard output" in done.stderr
    assert b"internal failure" not in done.stderr and b"Exception ignored" not in done.stderr


def test_a_full_disk_under_stderr(tmp_path: Path) -> None:
    assert shell("check missing.plan 2>/dev/full", tmp_path).returncode == 1


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("check /dev/zero", b"it is a device, not a regular file"),
        ("check pipe", b"it is a pipe, not a regular file"),
        ("check - </dev/zero", b"it is larger than 64 MiB"),
    ],
)
def test_files_without_end(tmp_path: Path, command: str, why: bytes) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = shell(command, tmp_path)
    assert done.returncode == 1
    assert b"CP0001" in done.stderr and why in done.stderr


def test_a_topology_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("name = " + "[" * 5000 + "]" * 5000)
    done = shell("compile p.plan --topology t.toml", tmp_path)
    assert done.returncode == 1
    assert b"CP0712" in done.stderr and b"nested too deep" in done.stderr


def test_interrupted_while_loading(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    done = shell("check p.plan", tmp_path)  # with -m, the working directory comes first
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")
