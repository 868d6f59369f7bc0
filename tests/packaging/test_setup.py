"""The messages of the set-up if something is missing; it leaves other files alone."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of a checkout that the set-up reads."""
    root = tmp_path / "checkout"
    for name in ("pyproject.toml", "constraints.txt", ".ci/venv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "commplan" / "dsl").mkdir(parents=True)
    (root / "commplan" / "dsl" / "ast.py").touch()
    return root


def folder_with_programs(folder: Path, *names: str) -> Path:
    """A folder with only these programs of the machine. `flock` is left out if the machine lacks it."""
    folder.mkdir()
    for name in names:
        path = shutil.which(name)
        if path is None and name == "flock":
            continue
        assert path, name
        (folder / name).symlink_to(path)
    return folder


def run_setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = environment.pop("PATH", os.environ["PATH"])
    shell = shutil.which("sh")
    assert shell
    return subprocess.run(
        [shell, ".ci/venv", ".venv", "demo", "constraints.txt"],
        cwd=checkout,
        env={"PATH": path, "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


TOOLS = ("sh", "cat", "mkdir", "rm", "id", "grep", "flock")


def test_no_python(checkout: Path, tmp_path: Path):
    result = run_setup(checkout, PATH=str(folder_with_programs(tmp_path / "bin", *TOOLS)))
    assert result.returncode == 2
    assert "Python 3.11 or newer was not found" in result.stderr
    assert "PYTHON=/path" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_none(checkout: Path):
    result = run_setup(checkout, PYTHON="no-such-python")
    assert result.returncode == 2
    assert "PYTHON=no-such-python is not a program" in result.stderr


def test_a_python_that_is_too_old(checkout: Path, tmp_path: Path):
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    result = run_setup(checkout, PYTHON=str(old))
    assert result.returncode == 2
    assert "older than Python 3.11" in result.stderr


def test_a_python_without_venv(checkout: Path, tmp_path: Path):
    bare = tmp_path / "bare-python"
    bare.write_text(
        f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\nexec {shlex.quote(sys.executable)} "$@"\n',
        encoding="utf-8",
    )
    bare.chmod(0o755)
    result = run_setup(checkout, PYTHON=str(bare))
    assert result.returncode == 2
    assert "no venv or ensurepip module" in result.stderr
    assert "python3-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_links_that_were_lost(checkout: Path):
    shutil.rmtree(checkout / "commplan" / "dsl")
    (checkout / "commplan" / "dsl").write_text("../dsl", encoding="utf-8")
    result = run_setup(checkout)
    assert result.returncode == 2
    assert "symbolic links" in result.stderr


def test_a_directory_that_is_not_ours_is_left_alone(checkout: Path):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").write_text("x", encoding="utf-8")
    result = run_setup(checkout)
    assert result.returncode == 2
    assert "was not made by this Makefile" in result.stderr
    assert (checkout / ".venv" / "precious").exists()


def test_an_index_that_cannot_be_reached(checkout: Path):
    result = run_setup(
        checkout,
        PYTHON=sys.executable,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(checkout),
        PIP_CONFIG_FILE="/dev/null",
    )
    assert result.returncode == 2
    assert "pip could not install what 'demo' needs" in result.stderr
    assert not (checkout / ".venv" / ".unfinished").exists()
    assert not list((checkout / ".venv").glob(".done-*"))


def test_an_interrupted_installation_starts_over(checkout: Path):
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "pip.py").touch()  # installing it takes seconds
    (venv / ".commplan").write_text(f"{checkout}\n", encoding="utf-8")
    (venv / ".unfinished").touch()
    (venv / "half").touch()
    result = run_setup(checkout, PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert result.returncode == 2  # without an index, pip cannot install
    assert "was interrupted; starting over" in result.stderr
    assert not (venv / "half").exists()
