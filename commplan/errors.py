"""Error codes: their ranges, and the page of the manual for each.

A code is CP and four digits; the first two denote its range. Its page is `commplan/pages/CODE.md`, with the
first line `# CODE: TITLE`. Codes of one family share a page: each has a section, `## CODE: TITLE`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

RANGES = {  # the subject of a code, by its first two digits
    "CP00": "syntax",
    "CP01": "names",
    "CP02": "types and functions",
    "CP03": "placements",
    "CP04": "stages",
    "CP05": "phases, states and outputs",
    "CP06": "algorithms and options",
    "CP07": "compiling and verifying",
    "CP08": "binding and running",
    "CP09": "input and parameter servers",
    "CP10": "schedule files",
    "CP11": "the command and the benches",
    "CP12": "warnings",
}
_PAGES = Path(__file__).with_name("pages")
_CODE = re.compile(r"CP\d{4}\.md")  # the file of a page of one code
_SECTION = re.compile(r"^## (?=CP\d{4}: )", re.MULTILINE)  # the beginning of a section of a family


def page(code: str) -> str | None:
    """The page for an error code in Markdown, or None if there is no such code.

    For a code of a family, this is its section followed by the introduction of the family's page.
    """
    page_path = _PAGES / f"{code}.md"
    return page_path.read_text(encoding="utf-8") if page_path.is_file() else _family_pages().get(code)


@functools.cache
def _family_pages() -> dict[str, str]:
    """The pages of all codes that share a file with others, by code."""
    pages: dict[str, str] = {}
    for page_path in _PAGES.iterdir():
        if not page_path.name.endswith(".md") or _CODE.match(page_path.name):
            continue
        introduction, *sections = _SECTION.split(page_path.read_text(encoding="utf-8"))
        common = introduction.partition("\n")[2].strip()
        pages |= {section[:6]: f"# {section.strip()}\n\n{common}\n" for section in sections}
    return pages


@functools.cache
def titles() -> dict[str, str]:
    """All codes in order, with the titles of their pages."""
    names = (page_path.name for page_path in _PAGES.iterdir())
    codes = sorted({*(name[:6] for name in names if _CODE.match(name)), *_family_pages()})
    return {code: (page(code) or "").partition("\n")[0].partition(": ")[2] for code in codes}
