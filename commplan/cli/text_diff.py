"""Unified diffs of texts, as printed by `diff -u`."""

from __future__ import annotations

import difflib

_PAINTS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def unified(before: str, after: str, name: str, change: str, color: bool) -> str:
    """The difference of two texts of the file `name`; empty if equal. `change` labels the new text."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    text = ""
    for line in difflib.unified_diff(old, new, name, f"{name} ({change})"):
        ended = line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n"
        paint = _PAINTS.get(line[0]) if color else None
        text += f"{paint}{ended[:-1]}\x1b[0m\n" if paint else ended
    return text
