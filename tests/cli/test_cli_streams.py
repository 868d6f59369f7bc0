"""Streams that are closed, and shapes that are nested deeper than anything reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAN = b"plan p\naxis data = 8\ninput x : tree per data\nat start {\n x = broadcast x over data from 0\n}\n"


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    (cwd / "p.plan").write_bytes(PLAN)
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m commplan.cli {command}', sys.executable],
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
