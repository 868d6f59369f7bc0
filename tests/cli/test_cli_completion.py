"""Completion: what the shells are told about verbs and flags."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from commplan.cli import main
from commplan.cli.arguments import SHELLS

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_verb_and_flag(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    out, _ = capsys.readouterr()
    for word in (
        "check",
        "fmt",
        "compile",
        "explain",
        "run",
        "passes",
        "new",
        "completion",
        "data_parallel",
        "mermaid",
    ):
        assert word in out
    for flag in ("oversubscribe", "dump-passes", "into"):
        assert flag in out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    "typed, expected",
    [
        (["commplan", "ch"], {"check"}),
        (["commplan", "compile", "--emit", "j"], {"jaxpr"}),
        (["commplan", "new", "s"], {"server", "sharded"}),
        (["commplan", "compile", "--time"], {"--time-passes"}),
    ],
)
def test_completion_works_in_bash(
    typed: list[str], expected: set[str], tmp_path: Path, capsys: Capture
) -> None:
    main(["completion", "bash"])
    words = " ".join(f"'{word}'" for word in typed)
    script = f"""{capsys.readouterr().out}
COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _commplan; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected and done.stderr == ""


# usage
