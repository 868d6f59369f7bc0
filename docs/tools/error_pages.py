"""The pages of all errors, from `commplan/pages`, and the list of them, `errors/index.md`."""

from __future__ import annotations

import posixpath
import re
import textwrap

from tables import cell

from commplan.errors import RANGES, page, titles

FOLDER = "errors"
CODE = re.compile(r"(?<![\w\[/`-])(CP\d{4})(?![\w\]`-]|\.\w)")
INDENTED = re.compile(r"^```(?s:.*?)^```$|^(?P<plain> {4}.*\n(?:(?: {4}.*)?\n)*)", re.M)
# The parts of a page in which codes are not linked: blocks and spans of code, links, headings.
VERBATIM = re.compile(r"^(```|~~~).*?^\1|^(?: {4}|#)[^\n]*$|`[^`\n]+`|\[[^\]\n]*\]\([^)\n]*\)", re.M | re.S)


def pages() -> dict[str, str]:
    """Name of the page -> its text."""
    texts = {f"{FOLDER}/{code}.md": _page(code) for code in titles()}
    return texts | {f"{FOLDER}/index.md": _index()}


def linked(markdown: str, name: str) -> str:
    """`markdown` of page `name`, its codes turned into links to their pages."""
    folder = posixpath.relpath(FOLDER, posixpath.dirname(name) or ".")
    parts: list[str] = []
    end = 0
    for kept in VERBATIM.finditer(markdown):
        parts += [_links(markdown[end : kept.start()], folder), kept[0]]
        end = kept.end()
    return "".join([*parts, _links(markdown[end:], folder)])


def _links(text: str, folder: str) -> str:
    known = titles()
    return CODE.sub(lambda code: f"[{code[1]}]({folder}/{code[1]}.md)" if code[1] in known else code[1], text)


def _page(code: str) -> str:
    """The manual's page, its indented plans as blocks of the language. The search ranks it first."""
    text = INDENTED.sub(lambda block: _fenced(block[0]) if block["plain"] else block[0], page(code) or "")
    return f"---\nsearch: {{boost: 2}}\n---\n\n{text}"


def _fenced(block: str) -> str:
    text = textwrap.dedent(block).rstrip()
    return f"```{'plan' if text.startswith('plan ') else 'text'}\n{text}\n```\n\n"


def _index() -> str:
    lines = [
        "# Errors",
        "",
        "Every error has a code and a page. `commplan explain CP0301` prints it, `commplan explain CP03`",
        "lists a range; here the search finds them by what they say.",
        "",
    ]
    for start, subject in RANGES.items():
        own = [(code, title) for code, title in titles().items() if code.startswith(start)]
        lines += [f"## {start}: {subject}", "", "| code | what it says |", "|---|---|"]
        lines += [f"| [{code}]({code}.md) | {cell(title)} |" for code, title in own]
        lines.append("")
    return "\n".join(lines)
