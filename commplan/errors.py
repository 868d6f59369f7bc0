"""The error codes: what each range of them is about, and the manual's page on each.

A code is four digits behind CP; the first two say its range. Its page is `commplan/pages/CODE.md`, whose
first line is `# CODE: TITLE`.
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
    """The manual's page on an error code, in Markdown, if there is one."""
    place = files("commplan").joinpath("pages", f"{code}.md")
    return place.read_text(encoding="utf-8") if place.is_file() else None


@functools.cache
def titles() -> dict[str, str]:
    """Every code with the title of its page, in order."""
    names = (place.name for place in files("commplan").joinpath("pages").iterdir())
    codes = sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))
    return {code: (page(code) or "").partition("\n")[0].partition(": ")[2] for code in codes}
