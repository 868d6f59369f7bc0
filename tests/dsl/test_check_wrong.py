"""Every wrong program gets exactly its errors, each at its line and column.

Each file of `tests/plans/wrong` lists its expected errors at the end: `#! CODE LINE:COLUMN`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commplan.diagnostics import Diagnostic
from commplan.dsl import load

WRONG = sorted((Path(__file__).parents[1] / "plans" / "wrong").glob("*.plan"))
EXPECTED = re.compile(r"^#! (CP\d{4}) (\d+):(\d+)$", re.MULTILINE)


def _places(diagnostics: tuple[Diagnostic, ...]) -> list[tuple[int, int, str]]:
    return sorted((d.span.line, d.span.column, d.code) for d in diagnostics if d.span)


def test_there_are_enough_wrong_programs() -> None:
    assert len(WRONG) >= 150


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_program_gets_exactly_its_errors(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    expected = sorted((int(line), int(column), code) for code, line, column in EXPECTED.findall(text))
    plan, diagnostics = load(text, path.name)
    assert expected
    assert plan is None
    assert _places(diagnostics) == expected, "\n".join(map(str, diagnostics))


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_diagnostics_point_into_the_file_and_their_fixes_help(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    _, diagnostics = load(text, path.name)
    for diagnostic in diagnostics:
        assert diagnostic.file == path.name
        assert not diagnostic.message.endswith(".")
        spans = [diagnostic.span, *(note.span for note in diagnostic.notes)]
        for span in filter(None, spans):
            assert 1 <= span.line <= span.end_line <= len(lines)
            assert (span.line, span.column) < (span.end_line, span.end_column)
            assert span.end_column <= len(lines[span.end_line - 1]) + 1
        if diagnostic.fix is None:
            continue
        span = diagnostic.fix.span
        assert span.line == span.end_line
        line = lines[span.line - 1]
        fixed_line = line[: span.column - 1] + diagnostic.fix.text + line[span.end_column - 1 :]
        repaired = "\n".join([*lines[: span.line - 1], fixed_line, *lines[span.line :]])
        _, after = load(repaired, path.name)
        place = (span.line, span.column, diagnostic.code)
        assert place not in _places(after), f"the fix {diagnostic.fix.title!r} does not mend it"


def test_wording_of_all_diagnostics() -> None:
    """Message, remarks and fix of every wrong program, as they were last read and approved."""
    wording = "\n".join(_wording(path) for path in WRONG)
    assert wording == (Path(__file__).parent / "golden" / "wording.txt").read_text(encoding="utf-8")


def _wording(path: Path) -> str:
    _, diagnostics = load(path.read_text(encoding="utf-8"), path.name)
    return "\n".join([*(f"{diagnostic}" for diagnostic in diagnostics), ""])
