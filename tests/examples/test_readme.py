"""The README's plan, error and program are real, and it fits on a few screens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REDUCE = "    grads = reduce grads over data by mean"


def block(kind: str) -> str:
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return text


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def test_it_has_at_most_700_words():
    assert len(README.split()) <= 700


def test_a_second_reduce_prints_the_error(tmp_path: Path):
    plan = re.sub(rf"^{REDUCE}.*\n", rf"\g<0>{REDUCE}\n", block("plan"), flags=re.MULTILINE)
    (tmp_path / "train.plan").write_text(plan, encoding="utf-8")
    done = run(tmp_path, "-m", "commplan.cli", "check", "train.plan", NO_COLOR="1", COLUMNS="200")
    assert done.returncode != 0
    assert done.stderr.startswith(block("text")), done.stderr


def test_the_program_runs(tmp_path: Path):
    (tmp_path / "train.plan").write_text(block("plan"), encoding="utf-8")
    done = run(tmp_path, "-W", "error", "-c", block("python"), JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 0, done.stdout + done.stderr
    name, accuracy = done.stdout.rsplit(maxsplit=1)
    assert name == "training accuracy"
    assert 0.9 < float(accuracy) <= 1


def test_every_file_it_names_exists():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target


def test_the_targets_it_names_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`|^    make (\w+)", README, re.MULTILINE)):
        name = "".join(target)
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
