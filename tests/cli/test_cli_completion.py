"""Completion in shells: verbs, flags, templates, codes and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commplan.cli import main
from commplan.cli.arguments import SHELLS

Capture = pytest.CaptureFixture[str]
COMMAND = Path(sys.executable).with_name("commplan")
ENVIRONMENT = {**os.environ, "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
# As bash calls it where Tab is pressed at the end of a line.
ASK = """{script}
COMP_LINE="{line}" COMP_POINT={point} COMP_TYPE=9 COMP_WORDBREAKS=" " _python_argcomplete commplan
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_is_told_to_ask_the_command(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    out, _ = capsys.readouterr()
    assert "_ARGCOMPLETE" in out and "commplan" in out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("commplan ch", {"check"}),
        ("commplan compile --emit j", {"jaxpr"}),
        ("commplan new s", {"server", "sharded"}),
        ("commplan compile --time", {"--time-passes"}),
        ("commplan check --wa", {"--watch"}),
        ("commplan explain CP120", {f"CP120{n}" for n in range(1, 10)}),
        ("commplan explain tr", {"training.plan"}),
        ("commplan check tr", {"training.plan"}),
        ("commplan check training.plan --topology m", {"machine.toml"}),
        ("commplan --ver", {"--version"}),
    ],
)
def test_bash_is_answered(line: str, expected: set[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "training.plan").touch()
    (tmp_path / "machine.toml").touch()
    main(["completion", "bash"])
    script = ASK.format(script=capsys.readouterr().out, line=line, point=len(line))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert {word.strip() for word in done.stdout.split("\n") if word.strip()} == expected
    assert done.stderr == ""
