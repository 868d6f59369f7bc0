"""`new`, and files that are written whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import document

from commplan.cli import main

Capture = pytest.CaptureFixture[str]


def test_new_lists_templates_and_never_overwrites(tmp_path: Path, capsys: Capture) -> None:
    assert main(["new"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["data_parallel", "elastic", "ensemble", "server", "sharded"]
    into = tmp_path / "a" / "b"
    assert main(["new", "sharded", "--into", str(into)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["check", str(into / "sharded.plan")]) == 0
    (into / "sharded.plan").unlink()
    (into / "sharded.py").write_text("mine")
    assert main(["new", "sharded", "--into", str(into)]) == 1
    assert "CP1106" in capsys.readouterr().err
    assert not (into / "sharded.plan").exists() and (into / "sharded.py").read_text() == "mine"


def test_what_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    limited = (
        "import resource, sys; from commplan.cli.console import Console;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8));"
        "Console().write(sys.argv[1], b'x' * int(sys.argv[2]))"
    )
    for nbytes, text in ((100, "old"), (8, "x" * 8)):
        done = subprocess.run(
            [sys.executable, "-c", limited, str(link), str(nbytes)], stderr=subprocess.PIPE, check=False
        )
        assert (b"CP1101" in done.stderr) == (nbytes > 8)
        assert path.read_text() == text and path.stat().st_mode & 0o777 == 0o640
        assert sorted(tmp_path.iterdir()) == [path, link] and link.is_symlink()


def test_new_as_json(tmp_path: Path, capsys: Capture) -> None:
    assert main(["new", "--format", "json"]) == 0
    assert {"name", "summary"} == set(document(capsys)["templates"][0])
    assert main(["new", "elastic", "--into", str(tmp_path), "--format", "json"]) == 0
    files = document(capsys)["files"]
    assert files == [str(tmp_path / "elastic.plan"), str(tmp_path / "elastic.py")]


def test_new_of_unknown_templates(capsys: Capture) -> None:
    assert main(["new", "data_paralel"]) == 1
    assert "did you mean `data_parallel`?" in capsys.readouterr().err


def test_new_says_where_it_cannot_write(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert main(["new", "elastic", "--into", str(tmp_path / "file" / "x")]) == 1
    assert "CP1101" in capsys.readouterr().err


def test_new_does_not_write_through_a_dangling_link(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "elastic.plan").symlink_to(tmp_path / "gone")
    assert main(["new", "elastic", "--into", str(tmp_path)]) == 1
    assert "CP1106" in capsys.readouterr().err and not (tmp_path / "gone").exists()
