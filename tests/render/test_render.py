"""Diagnostics in their five styles, the wording included."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from commplan.diagnostics import Diagnostic, Fix, Note, Severity, Span
from commplan.dsl import load
from commplan.render import Style, render
from commplan.render.human import human

TEXT = """plan example

axis data = 8
input grads : tree partial data
fn halve(tree -> tree on device

each stepp {
\tmean = reduc grads over data by mean
    total = reduce grads over dta by sum { bucket = 25MB }
    output mean, total
}
"""


@pytest.fixture(scope="module", name="diagnostics")
def _diagnostics() -> tuple[Diagnostic, ...]:
    return load(TEXT, "training.plan")[1]


@pytest.mark.parametrize("style", ["human", "concise", "json", "github", "sarif"])
def test_each_style(diagnostics: tuple[Diagnostic, ...], style: Style, snapshot: SnapshotAssertion) -> None:
    assert render(diagnostics, {"training.plan": TEXT}, style) == snapshot


def test_color_changes_nothing_but_the_color(diagnostics: tuple[Diagnostic, ...]) -> None:
    plain = render(diagnostics, {"training.plan": TEXT}, "human")
    colored = render(diagnostics, {"training.plan": TEXT}, "human", color=True)
    assert colored.count("\x1b[1;31m") >= len(diagnostics)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored).rstrip() == plain.rstrip()


@pytest.mark.parametrize("style", ["human", "concise", "github"])
def test_nothing_to_say_is_nothing(style: Style) -> None:
    assert render((), {}, style) == ""


def test_documents_are_documents_when_there_is_nothing_to_say() -> None:
    assert json.loads(render((), {}, "json"))["summary"] == {"errors": 0, "warnings": 0}
    assert json.loads(render((), {}, "sarif"))["runs"][0]["results"] == []


def _one(**fields: Any) -> Diagnostic:
    attributes: dict[str, Any] = {"code": "CP0009", "message": "wrong", "file": "f.plan", **fields}
    return Diagnostic(**attributes)


def _shown(text: str, *diagnostics: Diagnostic) -> list[str]:
    return human(diagnostics, {"f.plan": text}, color=False).splitlines()


def test_carets_stand_under_wide_characters_and_tabs() -> None:
    lines = _shown("ab\t語語 here", _one(span=Span(1, 7, 1, 11)))
    source, carets = lines[3], lines[4]
    assert source == "1 | ab    語語 here"
    assert carets == "  | " + " " * (2 + 4 + 4 + 1) + "^^^^"


def test_a_span_over_two_lines_is_marked_on_both() -> None:
    lines = _shown("one two\n  three four", _one(span=Span(1, 5, 2, 8)))
    assert lines[3:7] == ["1 | one two", "  |     ^^^", "2 |   three four", "  |   ^^^^^"]


def test_a_span_over_many_lines_is_marked_where_it_begins() -> None:
    lines = _shown("one two\n\n\nthree four", _one(span=Span(1, 5, 4, 6)))
    assert lines[3:5] == ["1 | one two", "  |     ^^^"]
    assert not any("three" in line for line in lines)


def test_other_places_are_shown_with_what_they_mean() -> None:
    text = "\n".join(f"line {number}" for number in range(1, 13))
    notes = (Note("it began here", Span(2, 1, 2, 5)), Note("a remark\nof two lines"))
    lines = _shown(text, _one(span=Span(12, 6, 12, 8), notes=notes))
    assert lines[1:] == [
        "  --> f.plan:12:6",
        "   |",
        " 2 | line 2",
        "   | ---- it began here",
        "...",
        "12 | line 12",
        "   |      ^^",
        "   = note: a remark",
        "           of two lines",
        "",
        "1 error; `commplan explain CP0009` says more",
    ]


def test_the_last_line_names_every_code_once_errors_first() -> None:
    codes = ["CP1201", "CP0002", "CP0003", "CP0002", "CP0004", "CP0005"]
    severities = [Severity.WARNING, *[Severity.ERROR] * 5]
    several = [Diagnostic(c, "m", None, severity=s) for c, s in zip(codes, severities, strict=True)]
    last = render(several, {}, "human", color=False).splitlines()[-1]
    named = "CP0002, CP0003, CP0004, CP0005, ..."
    assert last == f"5 errors and 1 warning; `commplan explain CODE` says more of {named}"


def test_long_lines_are_cut_around_the_mark() -> None:
    text = "x" * 5000 + "HERE" + "y" * 5000
    lines = _shown(text, _one(span=Span(1, 5001, 1, 5005)))
    source, carets = lines[3], lines[4]
    assert len(source) < 160 and source.startswith("1 | ...x") and source.endswith("y...")
    assert source[carets.index("^") : carets.rindex("^") + 1] == "HERE"


def test_control_characters_never_reach_the_terminal() -> None:
    assert "\x1b" not in "".join(_shown("a\x1b[31mb\x07", _one(span=Span(1, 1, 1, 2))))


def test_a_place_behind_the_end_of_the_file_is_no_trouble() -> None:
    lines = _shown("plan p", _one(span=Span(9, 3, 9, 4)))
    assert lines[3:5] == ["9 |", "  | ^"]


def test_without_the_text_the_place_is_still_named() -> None:
    shown = human((_one(span=Span(3, 4, 3, 5), notes=(Note("there", Span(1, 1, 1, 2)),)),), {}, color=False)
    assert "--> f.plan:3:4" in shown and "note: there" in shown


def test_without_a_place_the_file_is_named() -> None:
    assert " --> f.plan" in _shown("plan p", _one())
    assert not any("-->" in line for line in _shown("plan p", _one(file="")))


def test_warnings_are_counted_apart() -> None:
    lines = _shown("plan p", _one(severity=Severity.WARNING), _one(), _one())
    assert lines[0].startswith("warning[CP0009]: wrong")
    assert lines[-1].startswith("2 errors and 1 warning;")


def test_concise_is_one_line_each_whatever_the_message() -> None:
    text = render((_one(message="a\nb", span=Span(1, 2, 1, 3)), _one(file="")), {}, "concise")
    assert text == "f.plan:1:2: error[CP0009]: a b\nerror[CP0009]: wrong\n"


def test_github_commands_are_escaped() -> None:
    diagnostic = _one(message="50% of a,b:\nc", file="a,b:c.plan", span=Span(1, 2, 3, 4))
    assert render((diagnostic,), {}, "github") == (
        "::error file=a%2Cb%3Ac.plan,line=1,endLine=3,title=CP0009::50%25 of a,b:%0Ac\n"
    )


def test_sarif_names_rules_and_quotes_paths() -> None:
    fix = Fix("write it", Span(1, 1, 1, 2), "it")
    diagnostic = _one(
        file="my plans/a.plan", span=Span(1, 1, 1, 2), fix=fix, notes=(Note("far", Span(2, 1, 2, 2)),)
    )
    run = json.loads(render((diagnostic, _one(code="CP9999", file="/abs/b.plan")), {}, "sarif"))["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["CP0009", "CP9999"]
    assert rules[0]["shortDescription"]["text"] == "a statement is malformed"
    first, second = run["results"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20plans/a.plan"
    assert place["region"] == {"startLine": 1, "startColumn": 1, "endLine": 1, "endColumn": 2}
    assert first["relatedLocations"][0]["message"]["text"] == "far"
    assert first["fixes"][0]["artifactChanges"][0]["replacements"][0]["insertedContent"] == {"text": "it"}
    assert second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "file:///abs/b.plan"
