"""Every code of the checker has a page, every page a code, and the examples on them are true."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from commplan.dsl import load

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\bCP0[1-6]\d\d\b")
PAGES = sorted(p for p in (ROOT / "commplan" / "pages").glob("CP*.md") if CODE.fullmatch(p.stem))


def _codes_in_the_checker() -> set[str]:
    sources = (ROOT / "dsl" / "check").glob("*.py")
    return {code for path in sources for code in CODE.findall(path.read_text(encoding="utf-8"))}


def _example(page: str, heading: str) -> str:
    """The indented block under `Wrong:` or `Mended:`."""
    found = re.search(rf"^{heading}:\n\n((?:    .*\n|\n)+)", page, re.MULTILINE)
    assert found, f"no example under {heading}:"
    return textwrap.dedent(found[1])


def test_codes_and_pages_are_the_same_set() -> None:
    assert {path.stem for path in PAGES} == _codes_in_the_checker()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_shows_a_wrong_plan_and_a_mended_one(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page.startswith(f"# {path.stem}: ")
    plan, diagnostics = load(_example(page, "Wrong"), "wrong.plan")
    assert plan is None
    assert [diagnostic.code for diagnostic in diagnostics] == [path.stem]
    plan, diagnostics = load(_example(page, "Mended"), "mended.plan")
    assert plan is not None, "\n".join(map(str, diagnostics))
    assert not diagnostics
