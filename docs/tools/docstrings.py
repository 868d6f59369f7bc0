"""The docstrings of this project, as the reference shows them.

Parameters become list items: those in the sections `Args:` and `Attributes:`, and lines or sentences
`name: text` that begin with a parameter. Error codes become links to their pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
CODE = re.compile(r"(?<![\w/])(CP\d{4})(?!\w)")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")


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
    """`text` with parameters as list items, codes as links, and examples as code, not changed."""
    known, end, parts = "|".join(map(re.escape, names)), 0, list[str]()
    for example in EXAMPLE.finditer(text):
        parts += [_prose(text[end : example.start()], known), f"\n```pycon\n{example[0]}\n```\n"]
        end = example.end()
    return "\n".join([*parts, _prose(text[end:], known)])


def _sections(text: str) -> str:
    """`text` with the items of Google-style sections as list items at the left margin."""
    lines, section = list[str](), ""
    for line in text.splitlines():
        header = SECTION.fullmatch(line)
        item = (
            re.match(r" {4}(\*{0,2}\w+): (.*)", line) if section in ("Args", "Attributes", "Raises") else None
        )
        if header:
            section = header[1]
            lines += [f"**{section}**", ""]
        elif item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section and line.startswith("    "):
            lines.append(f"    {line.strip()}" if lines[-1].startswith(("- ", "    ")) else line.strip())
        else:
            section = section if not line else ""
            lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _prose(text: str, known: str) -> str:
    text = _sections(text)
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
        elif line.startswith(("- ", "    ", "**")):
            lines.append(line)
        elif lines and lines[-1].startswith(("- ", "    ")) and line and not line.startswith("Raises"):
            lines.append(f"    {line}")
        else:
            lines += ["", line] if line.startswith("Raises") else [line]
    return CODE.sub(r"[\1](../errors/\1.md)", "\n".join(lines))
