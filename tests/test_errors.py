"""The error codes: each has a page and is raised somewhere, and the examples on the pages are true."""

from __future__ import annotations

import doctest
import re
import textwrap
from pathlib import Path

import pytest

from commplan import diagnostics, errors
from commplan.dsl import analyze, load
from commplan.lint import LintInputs, lint
from commplan.topology import load_topology

ROOT = Path(__file__).parents[1]
CODES = errors.titles()


def _codes(*ranges: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("code", [code for code in CODES if code.startswith(ranges)])


def _page(code: str) -> str:
    text = errors.page(code)
    assert text is not None
    return text


def _example(page: str, heading: str) -> str:
    """The indented block under `Wrong:` or `Fixed:`."""
    block = re.search(rf"^{heading}:\n\n((?:    .*\n?|\n)+)", page, re.MULTILINE)
    assert block, f"no example under {heading}:"
    return textwrap.dedent(block[1])


def test_what_is_raised_has_a_page_and_a_page_is_raised() -> None:
    folders = ("commplan", "dsl", "lowering", "runtime", "bench")
    sources = {path.resolve() for room in folders for path in (ROOT / room).rglob("*.py")}
    raised = {code for path in sources for code in re.findall(r"\bCP\d{4}\b", path.read_text("utf-8"))}
    assert raised == set(CODES)
    assert errors.page("CP9999") is None


def test_codes_are_in_the_ranges() -> None:
    assert {code[:4] for code in CODES} == set(errors.RANGES)


def test_the_article_follows_the_noun() -> None:
    assert doctest.testmod(diagnostics).attempted >= 2
    assert not doctest.testmod(diagnostics).failed
    assert [diagnostics.with_article(noun) for noun in ("_Axis", "Unpack", "Union", "str")] == [
        "an _Axis", "an Unpack", "a Union", "a str",
    ]  # fmt: skip


def test_no_message_has_a_fixed_article_before_the_name_of_a_type() -> None:
    folders = [ROOT / room for room in ("commplan", "dsl", "lowering", "runtime")]
    elsewhere = ROOT / "runtime/input"
    fixed = [
        f"{path}: {match}"
        for folder in folders
        for path in folder.rglob("*.py")
        if not path.is_relative_to(elsewhere)
        for match in re.findall(r"\b[Aa]n? \{(?:type\(|\w*kind\w*[}(]|noun).*", path.read_text("utf-8"))
    ]
    assert not fixed, "\n".join(fixed)


@_codes("CP")
def test_a_page_begins_with_its_code_and_title(code: str) -> None:
    assert _page(code).startswith(f"# {code}: {CODES[code]}\n") and CODES[code]


def test_a_page_of_a_family_has_the_section_of_its_code_and_the_introduction() -> None:
    first, second = _page("CP0743"), _page("CP0744")
    assert first != second and first.rpartition("\n\n")[2] == second.rpartition("\n\n")[2]
    assert "counter-example" in first and "CP0744" not in first


@_codes("CP00")
def test_pages_on_syntax_show_what_they_explain(code: str) -> None:
    wrong = _example(_page(code), "Wrong")
    if "plan example" not in wrong:
        assert "commplan check" in wrong
        return
    assert code in {diagnostic.code for diagnostic in load(wrong, "wrong.plan")[1]}
    assert load(_example(_page(code), "Fixed"), "fixed.plan")[1] == ()


@_codes("CP01", "CP02", "CP03", "CP04", "CP05", "CP06")
def test_pages_on_plans_show_a_wrong_plan_and_a_fixed_one(code: str) -> None:
    plan, diagnostics = load(_example(_page(code), "Wrong"), "wrong.plan")
    assert plan is None and [diagnostic.code for diagnostic in diagnostics] == [code]
    plan, diagnostics = load(_example(_page(code), "Fixed"), "fixed.plan")
    assert plan is not None and not diagnostics, "\n".join(map(str, diagnostics))


@_codes("CP12")
def test_pages_on_warnings_show_one_and_how_it_goes(code: str) -> None:
    machine = ROOT / "examples" / "topologies" / "two_rack.toml"
    inputs = {"CP1206": LintInputs(records={"images": 100})}
    if code == "CP1204":
        inputs[code] = LintInputs(topology=load_topology(machine), options={"backend": "mpi"})
    for heading, expected in (("Wrong", [code]), ("Fixed", [])):
        analysis = analyze(_example(_page(code), heading), "example.plan")
        warnings = lint(analysis, inputs.get(code, LintInputs()))
        assert not analysis.diagnostics and [warning.code for warning in warnings] == expected


@_codes("CP09")
def test_pages_on_input_show_the_mistake_and_its_repair(code: str) -> None:
    pattern = r"^(Wrong|Fixed):\n\n```(?:python)?\n(.+?)\n```$"
    blocks = re.findall(pattern, _page(code), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["Wrong", "Fixed"]
    assert blocks[0][1] != blocks[1][1]
