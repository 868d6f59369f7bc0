"""The form of docstrings of the lowering, and its list of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "lowering"


def documented(text: str | None) -> Iterator[tuple[str, str]]:
    """The names and texts of the section `Args` of a docstring."""
    section = re.search(r"^( *)Args:\n((?:\1 +.*\n|\n)*)", f"{text or ''}\n", re.MULTILINE)
    entry = re.compile(r"^ {4}(?! )\*{0,2}(\w+): (.*)$", re.MULTILINE)
    yield from entry.findall(section[2] if section else "")


def test_entries_of_arguments_begin_with_a_capital() -> None:
    texts = {path: ast.walk(ast.parse(path.read_text())) for path in FOLDER.rglob("*.py")}
    entries = [
        (path.name, name, words)
        for path, nodes in texts.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for name, words in documented(ast.get_docstring(node))
    ]
    assert len(entries) > 100
    assert [entry for entry in entries if entry[2][:1].islower()] == []


def test_the_readme_of_the_mpi_lowering_has_all_files() -> None:
    folder = FOLDER / "mpi"
    text = (folder / "README.md").read_text()
    files = [path.relative_to(folder).as_posix() for path in (*folder.glob("*.py"), *folder.glob("job/*.py"))]
    undocumented = {
        name for name in files if name.rpartition("/")[2] not in ("__init__.py", "typing_shim.py")
    }
    assert {name for name in undocumented if f"`{name}`" not in text} == set()
