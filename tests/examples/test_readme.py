"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plan_is_the_example():
    plan = next(block for block in blocks("") if block.startswith("plan "))
    example = (ROOT / "examples" / "plans" / "data_parallel.plan").read_text(encoding="utf-8")
    assert plan in example


def test_the_explanation_is_what_the_command_prints():
    shown = next(block for block in blocks("") if block.startswith("each step"))
    command = " ".join(README.split()).partition("`commplan explain ")[2].partition("`")[0].split()
    said = run(sys.executable, "-m", "commplan.cli", "explain", *command, NO_COLOR="1", COLUMNS="200")
    assert shown in said


def test_the_program_runs():
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 24
    code = program + "\nprint(item['batch'].shape)\n"
    said = run(
        sys.executable,
        *("-W", "error", "-c", code),
        PYTHONPATH=str(ROOT / "examples"),
        JAX_NUM_CPU_DEVICES="8",
    )
    trained, lies = said.strip().splitlines()
    assert re.fullmatch(r"trained \d+ parameters", trained)
    assert lies == "(2, 64, 224, 224, 3)"


def test_every_file_it_names_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target


def test_the_targets_it_names_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`|^    make (\w+)", README, re.MULTILINE)):
        name = "".join(target)
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
