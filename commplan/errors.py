"""Error codes: their ranges, and the page of the manual for each.

A code is CP and four digits; the first two denote its range. Its page is `commplan/pages/CODE.md`, with the
first line `# CODE: TITLE`.
"""

from __future__ import annotations

import functools
from importlib.resources import files

RANGES = {
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


def page(code: str) -> str | None:
    """The page for an error code in Markdown, or None."""
    place = files("commplan").joinpath("pages", f"{code}.md")
    return place.read_text(encoding="utf-8") if place.is_file() else None


@functools.cache
def titles() -> dict[str, str]:
    """All codes in order, with the titles of their pages."""
    names = (place.name for place in files("commplan").joinpath("pages").iterdir())
    codes = sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))
    return {code: (page(code) or "").partition("\n")[0].partition(": ")[2] for code in codes}
