"""The picture of the grammar in the manual: a plan as VS Code's own tokenizer cuts it, drawn by Chromium.

make tokenizer && python docs/tools/grammar_picture.py examples/plans/ensemble_training.plan docs/images
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VSCODE = ROOT / "editors" / "vscode"
# As themes do: the longest beginning of a scope counts.
COLORS = {
    "light": {
        "": "#24292f", "comment": "#57606a", "storage": "#8250df", "keyword.control": "#a40e8a",
        "keyword.other": "#0550ae", "keyword.operator": "#24292f", "support.type": "#116329",
        "constant": "#953800", "constant.numeric": "#0a3069", "entity.name.function": "#6639ba",
        "support.class": "#116329", "support.function": "#953800", "variable.parameter": "#7d4e00",
        "punctuation": "#57606a", "page": "#ffffff",
    },
    "dark": {
        "": "#e6edf3", "comment": "#8b949e", "storage": "#d2a8ff", "keyword.control": "#ff7bd5",
        "keyword.other": "#79c0ff", "keyword.operator": "#e6edf3", "support.type": "#7ee787",
        "constant": "#ffa657", "constant.numeric": "#a5d6ff", "entity.name.function": "#d2a8ff",
        "support.class": "#7ee787", "support.function": "#ffa657", "variable.parameter": "#e3b341",
        "punctuation": "#8b949e", "page": "#0d1117",
    },
}  # fmt: skip
WIDTH, LINE = 900, 21


def pieces(text: str) -> list[list[tuple[int, int, list[str]]]]:
    """Of each line the pieces with their scopes."""
    asked = {"grammar": str(VSCODE / "syntaxes" / "plan.tmLanguage.json"), "texts": [text]}
    modules = ROOT / ".make" / "tokenizer" / "node_modules"
    done = subprocess.run(
        ["node", str(VSCODE / "tokenize.cjs")], input=json.dumps(asked), text=True, check=True,
        stdout=subprocess.PIPE, env={**os.environ, "NODE_PATH": str(modules)},
    )  # fmt: skip
    return json.loads(done.stdout)[0]


def page(text: str, theme: str) -> str:
    """The plan as a page."""
    colors = COLORS[theme]
    lines: list[str] = []
    for written, cut in zip(text.splitlines(), pieces(text), strict=False):
        spans = (
            f'<span style="color:{_color(scopes[-1], colors)}">{html.escape(written[start:end])}</span>'
            for start, end, scopes in cut
        )
        lines.append("".join(spans))
    style = f"background:{colors['page']};font:14px/{LINE}px monospace;margin:16px 20px;white-space:pre"
    return f'<!doctype html><meta charset="utf-8"><body style="{style}">{chr(10).join(lines)}</body>'


def _color(scope: str, colors: dict[str, str]) -> str:
    known = [beginning for beginning in colors if scope.startswith(beginning)]
    return colors[max(known, key=len)]


def main(plan: str, images: str) -> None:
    """Draw the plan in both themes."""
    text = Path(plan).read_text("utf-8")
    height = LINE * len(text.splitlines()) + 32
    for theme in COLORS:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "plan.html")
            place.write_text(page(text, theme), "utf-8")
            picture = Path(images, f"editor_{theme}.png").resolve()
            flags = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={folder}/p",
            ]
            size = [
                f"--window-size={WIDTH},{height}",
                "--force-device-scale-factor=1.5",
                f"--screenshot={picture}",
            ]
            subprocess.run(["chromium", *flags, *size, place.as_uri()], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(*sys.argv[1:3])
