"""Every code of the data runtime has a page, and every page of its range a code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\bCP09\d\d\b")
PAGES = sorted((ROOT / "commplan" / "pages").glob("CP09*.md"))


def test_codes_and_pages_are_the_same_set() -> None:
    used = {c for path in (ROOT / "runtime").rglob("*.py") for c in CODE.findall(path.read_text())}
    assert {page.stem for page in PAGES} == used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_mistake_and_its_repair(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.stem}: ")
    blocks = re.findall(r"^(Wrong|Mended):\n\n```(?:python)?\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["Wrong", "Mended"]
    assert blocks[0][1] != blocks[1][1]
