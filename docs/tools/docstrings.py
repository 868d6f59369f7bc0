"""The docstrings of this project, as the reference shows them.

A line or a sentence `name: text` that begins with a parameter describes it; the reference wants those as a
list. Codes of errors become links to their pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
CODE = re.compile(r"(?<![\w/])(CP\d{4})(?!\w)")


class Docstrings(griffe.Extension):
    """Rewrites each docstring when its object is found."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            func.docstring.value = rewritten(func.docstring.value, (each.name for each in func.parameters))

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            fields = [name for name, member in cls.members.items() if member.is_attribute]
            cls.docstring.value = rewritten(cls.docstring.value, fields)


def rewritten(text: str, names: Iterable[str]) -> str:
    """`text` with its parameters as list items, links, and examples as code."""
    known = "|".join(map(re.escape, names))
    if known:
        text = re.sub(rf"(?<=[.;]) ({known}): ", r"\n\1: ", text)
    lines = list[str]()
    for line in text.splitlines():
        match = re.match(rf"({known}): (.*)", line) if known else None
        if match:
            lines += [
                *([] if lines and lines[-1].startswith(("- ", "    ")) else [""]),
                f"- `{match[1]}`: {match[2]}",
            ]
        elif (
            lines and lines[-1].startswith(("- ", "    ")) and line and not line.startswith(("Raises", ">>>"))
        ):
            lines.append(f"    {line}")
        else:
            lines += ["", line] if line.startswith("Raises") else [line]
    linked = CODE.sub(r"[\1](../../errors/\1/)", "\n".join(lines))
    return EXAMPLE.sub(r"\n```pycon\n\g<0>\n```\n", linked)
